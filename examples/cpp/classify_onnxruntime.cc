// classify_onnxruntime MODEL.onnx IMAGE.f32: prints the class of one picture. The INT8 file needs no other settings.
#include <onnxruntime_cxx_api.h>

#include <functional>
#include <iostream>
#include <numeric>

#include "image.h"

int main(int argc, char** argv) try {
  if (argc != 3) throw std::runtime_error("usage: classify_onnxruntime MODEL.onnx IMAGE.f32");
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "classify");
  Ort::Session session(env, argv[1], Ort::SessionOptions{});
  Ort::AllocatorWithDefaultOptions allocator;
  auto input = session.GetInputNameAllocated(0, allocator);
  auto output = session.GetOutputNameAllocated(0, allocator);
  auto shape = session.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape();
  shape[0] = 1;
  auto count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());

  auto image = read_image(argv[2], count);
  auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
  auto tensor = Ort::Value::CreateTensor<float>(memory, image.data(), image.size(), shape.data(), shape.size());
  const char* inputs[] = {input.get()};
  const char* outputs[] = {output.get()};
  auto logits = session.Run(Ort::RunOptions{nullptr}, inputs, &tensor, 1, outputs, 1);
  auto size = logits[0].GetTensorTypeAndShapeInfo().GetElementCount();
  std::cout << best(logits[0].GetTensorData<float>(), size) << std::endl;
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 2;
}
