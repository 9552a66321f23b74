// The torch operators for lists of keys. Their first arguments are those of a `Call`.

#pragma once

#include <optional>
#include <tuple>

#include "backward.h"
#include "forward.h"

namespace sparsering::cpu::lists {

#define SPARSERING_LISTS                                                                          \
  const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &keys,                \
      const std::optional<Tensor>&places, const std::optional<Tensor>&bias, int64_t branch,       \
      int64_t first, const std::optional<Tensor>&of_queries, const std::optional<Tensor>&of_keys, \
      double scale, double softcap, const std::optional<Tensor>&distance_bias, double dropout_p,  \
      const std::optional<Tensor>&seeds, Tensors coordinates, bool ordered

#define SPARSERING_LISTS_SCHEMA                                                             \
  "Tensor query, Tensor key, Tensor value, Tensor keys, Tensor? places, Tensor? bias, int " \
  "branch, int first, Tensor? of_queries, Tensor? of_keys, "                                \
  "float scale, float softcap, Tensor? distance_bias, float dropout_p, Tensor? seeds, "     \
  "Tensor[] coordinates, bool ordered, "

// Builds a `Call` from an operator's arguments, and calls f with it.
template <typename F>
void with_call(SPARSERING_LISTS, const F& f) {
  const Order order(ordered);
  const Extras extras(softcap, distance_bias, dropout_p, seeds, {}, coordinates, query.size(0),
                      query.size(1), query.size(2), key.size(2));
  const Tensor no_entries = zeros({0, 1, 1}, kLong);
  const Problem x(query, key, value, {}, extras, no_entries, 0, 16, scale);
  f(Call(x, keys, places, bias, branch, Stand(first, of_queries, of_keys, x)));
}

inline void check_results(const Problem& x, const Tensor& rows, const Tensor& numbers, Dtype type) {
  SPARSERING_CHECK(rows.has_sizes({x.B, x.Hq, x.Nq, x.Dv}) && rows.dtype() == type &&
                       numbers.has_sizes({x.B, x.Hq, x.Nq}) && numbers.dtype() == kFloat &&
                       numbers.is_contiguous(),
                   "sparsering cpu: results of lists do not fit the call");
}

// Merges the results of the lists into `out` and `lse`. `out` is float unless `fresh`.
inline void forward_lists(SPARSERING_LISTS, bool fresh, const Tensor& out, const Tensor& lse) {
  with_call(query, key, value, keys, places, bias, branch, first, of_queries, of_keys, scale,
            softcap, distance_bias, dropout_p, seeds, coordinates, ordered, [&](const Call& call) {
              const bool whole = out.dtype() == kFloat;
              check_results(call.x, out, lse, whole ? kFloat : call.x.k.type);
              SPARSERING_CHECK(out.is_contiguous() && (whole || fresh),
                               "sparsering cpu: out must be contiguous, and float for a merge");
              if (lse.numel() == 0) {
                return;
              }
              float* lses = lse.mutable_data_ptr<float>();
              with_type(call.x.k.type, [&](auto value) {
                using S = decltype(value);
                if (whole) {
                  forward<S>(call, Results<float>{out.mutable_data_ptr<float>(), lses, fresh});
                } else {
                  forward<S>(call, Results<S>{out.mutable_data_ptr<S>(), lses, fresh});
                }
              });
            });
}

// Returns dQ, dK, dV, the gradient of the bias, that of the distance bias, which is in pieces, and
// those of coordinates: [B, Hq, Nq, dims + 1] as for tiles, and [pieces, B, Hkv, Nk, dims].
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_lists(
    SPARSERING_LISTS, const Tensor& out, const Tensor& lse, const Tensor& grad_out,
    const Tensor& grad_lse, bool learns_distances, bool learns_coordinates) {
  Tensor dq = empty(query.sizes(), kFloat), dk = zeros(key.sizes(), kFloat),
         dv = zeros(value.sizes(), kFloat), dbias, dtable, dquery_coords, dkey_coords;
  with_call(query, key, value, keys, places, bias, branch, first, of_queries, of_keys, scale,
            softcap, distance_bias, dropout_p, seeds, coordinates, ordered, [&](const Call& call) {
              const Problem& x = call.x;
              check_results(x, out, lse, x.q.type);
              check_results(x, grad_out, grad_lse, x.q.type);
              const bool learns = distance_bias && learns_distances;
              dbias = bias ? zeros(bias->sizes(), kFloat) : empty({0}, kFloat);
              dtable = zeros({x.B, x.Hq, Backward::pieces(x), learns ? distance_bias->size(2) : 0},
                             kDouble);
              const int64_t dims = learns_coordinates ? x.extras.coordinates.dims : 0;
              dquery_coords = zeros({x.B, x.Hq, dims ? x.Nq : 0, dims + 1}, kFloat);
              dkey_coords = zeros({Backward::pieces(x), x.B, x.Hkv, x.Nk, dims}, kFloat);
              if (lse.numel() == 0) {
                return;
              }
              Buffer<float> delta(lse.numel());
              const Delta delta_of(x, grad_out, out, grad_lse);
              parallel_for(0, lse.numel(), 256, [&](int64_t begin, int64_t end) {
                delta_of.of_rows(begin, end, delta.get());
              });
              const Backward::To to{dq.mutable_data_ptr<float>(),
                                    dk.mutable_data_ptr<float>(),
                                    dv.mutable_data_ptr<float>(),
                                    bias ? dbias.mutable_data_ptr<float>() : nullptr,
                                    learns ? dtable.mutable_data_ptr<double>() : nullptr,
                                    dims ? dquery_coords.mutable_data_ptr<float>() : nullptr,
                                    dims ? dkey_coords.mutable_data_ptr<float>() : nullptr};
              Backward(call, grad_out, values_of<float>(lse), delta.get(), to).run();
            });
  return {dq, dk, dv, dbias, dtable, dquery_coords, dkey_coords};
}

}  // namespace sparsering::cpu::lists
