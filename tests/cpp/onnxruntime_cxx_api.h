// The part of ONNX Runtime's C++ interface that examples/cpp uses, over the C interface of its library. The Python package has
// the library and no headers, so the test compiles the example with this one, links it and runs it. The places of functions in
// the table are fixed: "OrtApi: new functions are added at the end only" (onnxruntime_c_api.h), so they hold for every 1.x.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

struct OrtAllocator;
struct OrtMemoryInfo;
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 };
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtMemType { OrtMemTypeCPU = -1 };

extern "C" {
struct OrtApiBase {
  void* const* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};
const OrtApiBase* OrtGetApiBase();
}

namespace Ort {
struct Exception : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {
enum Place {
  GetErrorMessage = 2, CreateEnv = 3, CreateSession = 7, RunSession = 9, CreateSessionOptions = 10, InputTypeInfo = 33,
  InputName = 36, OutputName = 37, CreateTensorWithData = 49, TensorData = 51, TensorInfoOfType = 55, DimensionsCount = 61,
  Dimensions = 62, ElementCount = 64, TensorInfoOfValue = 65, CreateCpuMemoryInfo = 69, AllocatorFree = 76,
  DefaultAllocator = 78, ReleaseEnv = 92, ReleaseStatus = 93, ReleaseMemoryInfo = 94, ReleaseSession = 95, ReleaseValue = 96,
  ReleaseTypeInfo = 98, ReleaseTensorInfo = 99, ReleaseSessionOptions = 100,
};

template <typename Result, typename... Arguments>
Result call(Place place, Arguments... arguments) {
  static void* const* api = OrtGetApiBase()->GetApi(13);
  return reinterpret_cast<Result (*)(Arguments...)>(api[place])(arguments...);
}

template <typename... Arguments>
void check(Place place, Arguments... arguments) {
  if (void* status = call<void*>(place, arguments...)) {
    Exception error(call<const char*>(GetErrorMessage, static_cast<const void*>(status)));
    call<void>(ReleaseStatus, status);
    throw error;
  }
}

template <Place release>
struct Owned {
  struct Release {
    void operator()(void* p) const { call<void>(release, p); }
  };
  std::unique_ptr<void, Release> held;
  void* get() const { return held.get(); }
};
}  // namespace detail

struct Env : detail::Owned<detail::ReleaseEnv> {
  Env(OrtLoggingLevel level, const char* name) {
    void* made;
    detail::check(detail::CreateEnv, level, name, &made);
    held.reset(made);
  }
};

struct SessionOptions : detail::Owned<detail::ReleaseSessionOptions> {
  SessionOptions() {
    void* made;
    detail::check(detail::CreateSessionOptions, &made);
    held.reset(made);
  }
};

struct RunOptions {
  explicit RunOptions(std::nullptr_t) {}
};

struct AllocatorWithDefaultOptions {
  OrtAllocator* allocator;
  AllocatorWithDefaultOptions() { detail::check(detail::DefaultAllocator, &allocator); }
  operator OrtAllocator*() { return allocator; }
};

struct MemoryInfo : detail::Owned<detail::ReleaseMemoryInfo> {
  static MemoryInfo CreateCpu(OrtAllocatorType type, OrtMemType memory) {
    void* made;
    detail::check(detail::CreateCpuMemoryInfo, type, memory, &made);
    MemoryInfo info;
    info.held.reset(made);
    return info;
  }
  operator const OrtMemoryInfo*() const { return static_cast<const OrtMemoryInfo*>(get()); }
};

struct TensorTypeAndShapeInfo {
  std::shared_ptr<void> owner;  // of the type or of the information itself
  const void* info;
  std::vector<int64_t> GetShape() const {
    size_t count;
    detail::check(detail::DimensionsCount, info, &count);
    std::vector<int64_t> shape(count);
    detail::check(detail::Dimensions, info, shape.data(), count);
    return shape;
  }
  size_t GetElementCount() const {
    size_t count;
    detail::check(detail::ElementCount, info, &count);
    return count;
  }
};

struct TypeInfo {
  std::shared_ptr<void> owner;
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const {
    const void* info;
    detail::check(detail::TensorInfoOfType, static_cast<const void*>(owner.get()), &info);
    return {owner, info};
  }
};

struct Value : detail::Owned<detail::ReleaseValue> {
  template <typename T>
  static Value CreateTensor(const OrtMemoryInfo* info, T* data, size_t count, const int64_t* shape, size_t dimensions) {
    static_assert(std::is_same<T, float>::value, "1 below is the element type float");
    void* made;
    detail::check(detail::CreateTensorWithData, info, static_cast<void*>(data), count * sizeof(T), shape, dimensions, 1, &made);
    return of(made);
  }
  static Value of(void* made) {
    Value value;
    value.held.reset(made);
    return value;
  }
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const {
    void* info;
    detail::check(detail::TensorInfoOfValue, static_cast<const void*>(get()), &info);
    return {std::shared_ptr<void>(info, [](void* p) { detail::call<void>(detail::ReleaseTensorInfo, p); }), info};
  }
  template <typename T>
  const T* GetTensorData() const {
    void* data;
    detail::check(detail::TensorData, get(), &data);
    return static_cast<const T*>(data);
  }
};

using AllocatedStringPtr = std::unique_ptr<char, std::function<void(char*)>>;

struct Session : detail::Owned<detail::ReleaseSession> {
  Session(const Env& env, const char* path, const SessionOptions& options) {
    void* made;
    detail::check(detail::CreateSession, static_cast<const void*>(env.get()), path, static_cast<const void*>(options.get()), &made);
    held.reset(made);
  }
  AllocatedStringPtr GetInputNameAllocated(size_t index, OrtAllocator* allocator) const {
    return name(detail::InputName, index, allocator);
  }
  AllocatedStringPtr GetOutputNameAllocated(size_t index, OrtAllocator* allocator) const {
    return name(detail::OutputName, index, allocator);
  }
  TypeInfo GetInputTypeInfo(size_t index) const {
    void* info;
    detail::check(detail::InputTypeInfo, static_cast<const void*>(get()), index, &info);
    return {std::shared_ptr<void>(info, [](void* p) { detail::call<void>(detail::ReleaseTypeInfo, p); })};
  }
  std::vector<Value> Run(const RunOptions&, const char* const* input_names, const Value* inputs, size_t input_count,
                         const char* const* output_names, size_t output_count) {
    std::vector<const void*> given(input_count);
    for (size_t i = 0; i < input_count; ++i) given[i] = inputs[i].get();
    std::vector<void*> made(output_count);
    detail::check(detail::RunSession, get(), static_cast<const void*>(nullptr), input_names, given.data(), input_count,
                  output_names, output_count, made.data());
    std::vector<Value> values;
    for (void* value : made) values.push_back(Value::of(value));
    return values;
  }

 private:
  AllocatedStringPtr name(detail::Place place, size_t index, OrtAllocator* allocator) const {
    char* text;
    detail::check(place, static_cast<const void*>(get()), index, allocator, &text);
    auto release = [allocator](char* p) { detail::check(detail::AllocatorFree, allocator, static_cast<void*>(p)); };
    return AllocatedStringPtr(text, release);
  }
};
}  // namespace Ort
