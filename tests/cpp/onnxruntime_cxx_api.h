// The part of ONNX Runtime's C++ interface that examples/cpp uses, as declarations alone: its Python package has no
// headers, so the example is checked for syntax and types against these and is not linked. Signatures are those of
// onnxruntime_cxx_api.h since 1.13.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

struct OrtAllocator;
struct OrtMemoryInfo;
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 };
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtMemType { OrtMemTypeCPU = -1 };

namespace Ort {
struct Env {
  Env(OrtLoggingLevel level, const char* name);
};
struct SessionOptions {};
struct RunOptions {
  explicit RunOptions(std::nullptr_t);
};
struct AllocatorWithDefaultOptions {
  operator OrtAllocator*();
};
struct MemoryInfo {
  static MemoryInfo CreateCpu(OrtAllocatorType type, OrtMemType memory);
  operator OrtMemoryInfo*();
  operator const OrtMemoryInfo*() const;
};
struct TensorTypeAndShapeInfo {
  std::vector<int64_t> GetShape() const;
  size_t GetElementCount() const;
};
struct TypeInfo {
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const;
};
struct Value {
  Value(Value&&);
  template <typename T>
  static Value CreateTensor(const OrtMemoryInfo* info, T* data, size_t count, const int64_t* shape, size_t dimensions);
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const;
  template <typename T>
  const T* GetTensorData() const;
};
using AllocatedStringPtr = std::unique_ptr<char, void (*)(void*)>;
struct Session {
  Session(const Env& env, const char* path, const SessionOptions& options);
  AllocatedStringPtr GetInputNameAllocated(size_t index, OrtAllocator* allocator) const;
  AllocatedStringPtr GetOutputNameAllocated(size_t index, OrtAllocator* allocator) const;
  TypeInfo GetInputTypeInfo(size_t index) const;
  std::vector<Value> Run(const RunOptions& options, const char* const* input_names, const Value* inputs,
                         size_t input_count, const char* const* output_names, size_t output_count);
};
}  // namespace Ort
