// classify_openvino MODEL.onnx IMAGE.f32: prints the class of one picture. The INT8 file needs no other settings.
#include <iostream>
#include <openvino/openvino.hpp>

#include "image.h"

int main(int argc, char** argv) try {
  if (argc != 3) throw std::runtime_error("usage: classify_openvino MODEL.onnx IMAGE.f32");
  ov::Core core;
  auto model = core.read_model(argv[1]);
  auto shape = model->input().get_partial_shape();
  shape[0] = 1;  // a fixed batch is faster
  model->reshape(shape);
  auto compiled = core.compile_model(model, "CPU", ov::hint::performance_mode(ov::hint::PerformanceMode::LATENCY));
  auto request = compiled.create_infer_request();

  auto image = read_image(argv[2], ov::shape_size(shape.to_shape()));
  request.set_input_tensor(ov::Tensor(ov::element::f32, shape.to_shape(), image.data()));
  request.infer();
  auto logits = request.get_output_tensor();
  std::cout << best(logits.data<float>(), logits.get_size()) << std::endl;
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 2;
}
