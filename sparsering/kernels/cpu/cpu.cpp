// The CPU backend's kernel: attention over the passes of a block layout, forward and backward.
//
// All but a few queries (few.h) work on transposed scores, S^T [keys, queries] of a key tile
// and a query tile: a query's maximum, sum and lse are then lanes of vectors, P^T and dS^T are left
// operands of the next product as they stand, and only the small tiles are ever transposed, never
// the scores. With the left operand in rows ("A") and the right one packed for brgemm ("B": as it
// is in float32, pairs of rows interleaved in bfloat16):
//
//   forward    S^T = K Q^T      O^T += V^T P^T
//   backward   S^T = K Q^T      dP^T = V dO^T
//              dV += P^T dO     dK += dS^T Q       dQ^T += K^T dS^T
//
// T is the type of the products' operands: BFloat16 where the processor multiplies it, else float.
// Sums, scores and softmax are float. Key tiles are packed once per kv head and pass; all else
// lives in one scratch per thread. Work is handed out tile row by tile row in whatever order
// threads ask for it, and no result depends on who computed it.

#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "backward.h"
#include "forward.h"

namespace sparsering::cpu {
namespace {

// Whether brgemm multiplies bfloat16 here (it raises where it does not).
bool has_bfloat16_products() {
  if (!at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  static const bool has = [] {
    Buffer<BFloat16> a(16 * 32), b(32 * 16);
    Buffer<float> c(16 * 16);
    std::fill_n(a.get(), 16 * 32, BFloat16(1));
    std::fill_n(b.get(), 32 * 16, BFloat16(1));
    try {
      multiply<BFloat16>(16, 16, 32, a.get(), 32, b.get(), c.get(), false);
      at::native::cpublas::brgemm_release();
      return c.get()[0] == 32.f;
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return has;
}

std::vector<Pass> passes_of(const Problem& x, at::TensorList tensors, at::IntArrayRef steps) {
  TORCH_CHECK_VALUE(tensors.size() == steps.size() * Pass::kTensors,
                    "sparsering cpu: malformed layout: tensors missing");
  std::vector<Pass> passes;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto of_pass = tensors.slice(i * Pass::kTensors, Pass::kTensors);
    passes.emplace_back(of_pass, steps[i], x.block);
    check_pass(of_pass, passes.back(), x.Nq, x.Nk, x.B, x.Hq, x.Hkv);
    x.check_bias(passes.back(), i);
  }
  return passes;
}

// `covers`: the first pass has every query in a tile.
std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const std::optional<Tensor>& bias, const Tensor& first_entry,
                                   at::TensorList tensors, at::IntArrayRef steps, bool covers,
                                   int64_t block, double scale, bool in_float32) {
  const Problem x(query, key, value, bias, first_entry, steps.size(), block, scale);
  const std::vector<Pass> passes = passes_of(x, tensors, steps);
  const auto options = in_float32 ? query.options().dtype(at::kFloat) : query.options();
  Tensor out = covers ? at::empty({x.B, x.Hq, x.Nq, x.Dv}, options)
                      : at::zeros({x.B, x.Hq, x.Nq, x.Dv}, options);
  Tensor lse = at::full({x.B, x.Hq, x.Nq}, -kInf, query.options().dtype(at::kFloat));
  if (lse.numel() == 0) {
    return {out, lse};
  }
  if (query.scalar_type() == at::kBFloat16 && has_bfloat16_products()) {
    Forward<BFloat16>(x, passes).run(passes, covers, out, lse);
  } else {
    Forward<float>(x, passes).run(passes, covers, out, lse);
  }
  return {out, lse};
}

// `transposes` is empty for run_heads.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias,
    const Tensor& first_entry, at::TensorList tensors, at::IntArrayRef steps, bool covers,
    int64_t block, double scale, bool in_float32, const Tensor& out, const Tensor& lse,
    const Tensor& grad_out, const Tensor& grad_lse, at::TensorList transposes) {
  const Problem x(query, key, value, bias, first_entry, steps.size(), block, scale);
  const std::vector<Pass> passes = passes_of(x, tensors, steps);
  std::vector<Transpose> by_key;
  for (size_t i = 0; !transposes.empty() && i < passes.size(); ++i) {
    const auto of_pass = transposes.slice(i * Transpose::kTensors, Transpose::kTensors);
    check_transpose(of_pass, passes[i]);
    by_key.emplace_back(of_pass);
  }
  const auto options = in_float32 ? query.options().dtype(at::kFloat) : query.options();
  Tensor dq = at::zeros(query.sizes(), options), dk = at::zeros(key.sizes(), options),
         dv = at::zeros(value.sizes(), options);
  Tensor dbias = bias ? at::zeros_like(*bias) : at::empty({0}, query.options().dtype(at::kFloat));
  for (const Tensor& like : {grad_out, out}) {
    TORCH_CHECK_VALUE(like.sizes() == at::IntArrayRef({x.B, x.Hq, x.Nq, x.Dv}) &&
                          like.scalar_type() == query.scalar_type(),
                      "sparsering cpu: out and its gradient must be as forward made them");
  }
  for (const Tensor& like : {grad_lse, lse}) {
    TORCH_CHECK_VALUE(like.sizes() == at::IntArrayRef({x.B, x.Hq, x.Nq}) &&
                          like.scalar_type() == at::kFloat && like.is_contiguous(),
                      "sparsering cpu: lse and its gradient must be as forward made them");
  }
  if (lse.numel() == 0) {
    return {dq, dk, dv, dbias};
  }
  const auto run = [&](auto kernel) {
    if (by_key.empty()) {
      kernel.run_heads();
    } else {
      kernel.run_tiles(by_key);
    }
  };
  if (query.scalar_type() == at::kBFloat16 && has_bfloat16_products()) {
    run(Backward<BFloat16>(x, passes, grad_out, out, lse, grad_lse, dq, dk, dv, dbias));
  } else {
    run(Backward<float>(x, passes, grad_out, out, lse, grad_lse, dq, dk, dv, dbias));
  }
  return {dq, dk, dv, dbias};
}

}  // namespace

TORCH_LIBRARY(sparsering_cpu, m) {
  m.def(R"(forward(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor first_entry,
      Tensor[] passes, int[] steps, bool covers, int block, float scale,
      bool in_float32) -> (Tensor, Tensor))",
        forward);
  m.def(R"(backward(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor first_entry,
      Tensor[] passes, int[] steps, bool covers, int block, float scale, bool in_float32,
      Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse,
      Tensor[] transposes) -> (Tensor, Tensor, Tensor, Tensor))",
        backward);
}

}  // namespace sparsering::cpu
