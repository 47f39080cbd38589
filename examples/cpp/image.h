// A picture as raw floats, and the place of the largest number.
#pragma once
#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

// Reads exactly `count` float32 numbers, (C, H, W), normalized as the file's metadata `compress.preprocessing` says.
inline std::vector<float> read_image(const std::string& path, size_t count) {
  std::vector<float> values(count);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()), count * sizeof(float));
  if (!file || file.peek() != EOF)
    throw std::runtime_error(path + " must hold " + std::to_string(count) + " float32 numbers");
  return values;
}

inline long best(const float* begin, size_t count) { return std::max_element(begin, begin + count) - begin; }
