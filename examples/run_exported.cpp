// Runs a package that AOTInductor made of an exported model, without Python, and checks its output.
//
//   run_exported model.pt2 data.pt
//
// data.pt is torch.save([*inputs, expected]). It prints the largest error, and ends with 1 if that
// is above 1e-5. To build it, DIR is the folder of torch (python -c "import torch; print(torch)"):
//
//   g++ -std=c++20 -O2 run_exported.cpp -I DIR/include -I DIR/include/torch/csrc/api/include
//       -L DIR/lib -Wl,-rpath,DIR/lib -ltorch -ltorch_cpu -lc10 -o run_exported
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>
#include <torch/torch.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Reads a list of tensors that torch.save wrote.
std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("expected a file of tensors, got no file " + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const c10::IValue saved = torch::pickle_load(bytes);
  for (const c10::IValue& value : saved.toListRef()) tensors.push_back(value.toTensor());
  return tensors;
}

int run(const std::string& package, const std::string& data) {
  std::vector<at::Tensor> inputs = read_tensors(data);
  const at::Tensor expected = inputs.back();
  inputs.pop_back();
  torch::inductor::AOTIModelPackageLoader model(package);
  const at::Tensor output = model.run(inputs).at(0);
  const double error = (output - expected).abs().max().item<double>();
  std::cout << "largest error " << error << '\n';
  return error <= 1e-5 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "expected two files, such as: run_exported model.pt2 data.pt\n";
    return 2;
  }
  try {
    const c10::InferenceMode guard;
    return run(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
