// The CPU backend's kernel: attention over the passes of a block layout, forward and backward.
//
// Except for calls of a few queries (few.h), scores are transposed: S^T [keys, queries] of a key
// tile and a query tile. Each query's maximum, sum and lse are then in one lane of a vector, and
// P^T and dS^T are left operands of the next product without a copy. Only the small tiles are
// transposed, never the scores. The left operand A is stored in rows. The right operand B is packed
// for brgemm: unchanged in float32, pairs of rows interleaved in bfloat16.
//
//   forward    S^T = K Q^T      O^T += V^T P^T
//   backward   S^T = K Q^T      dP^T = V dO^T
//              dV += P^T dO     dK += dS^T Q       dQ^T += K^T dS^T
//
// tangents.h has the products of forward-mode and second derivatives.
//
// T is the type of the products' operands: BFloat16 if the processor multiplies it, else float.
// Sums, scores and softmax are float. Key tiles are packed once per kv head and pass; a thread has
// one scratch for all other buffers. Threads take rows of tiles in any order, and results do not
// depend on that order.

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "backward.h"
#include "forward.h"
#include "laid.h"
#include "lists/operators.h"
#include "lower/operators.h"
#include "machine/operators.h"
#include "plan/workspace.h"
#include "selection/shares.h"
#include "stored.h"
#include "tangents.h"
#include "walk/mass.h"

namespace sparsering::cpu {
namespace {

// Returns x, contiguous in the head dim as all loops need it; copies only if needed.
Tensor dense_rows(const Tensor& x) {
  return x.dim() != 4 || x.size(3) <= 1 || x.stride(3) == 1 ? x : contiguous(x);
}

// Reads and checks the passes. `places` is empty unless extras depend on positions.
std::vector<Pass> passes_of(const Problem& x, Tensors tensors, Tensors places, Ints steps,
                            Ints branches, Ints walked) {
  const bool placed = x.extras.adjusts() || x.extras.drops();
  SPARSERING_CHECK(tensors.size() == steps.size() * Pass::kTensors &&
                       branches.size() == steps.size() && walked.size() == steps.size() &&
                       places.size() == (placed ? steps.size() * Pass::kPlaces : 0),
                   "sparsering cpu: malformed layout: tensors missing");
  std::vector<Pass> passes;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto of_pass = tensors.subspan(i * Pass::kTensors, Pass::kTensors);
    const auto places_of = placed ? places.subspan(i * Pass::kPlaces, Pass::kPlaces) : places;
    passes.emplace_back(of_pass, places_of, steps[i], x.block, branches[i]);
    check_pass(of_pass, passes.back(), x.Nq, x.Nk, x.B, x.Hq, x.Hkv);
    if (placed) {
      check_places(places_of, passes.back(), x.extras.streams, x.B);
    }
    if (x.bias || x.blocks) {
      x.check_entries(passes.back(), i);
    }
    passes.back().walked = walked[i];
    SPARSERING_CHECK(!walked[i] || !(placed || x.extras.coordinates),
                     "sparsering cpu: what goes by positions is not walked by key tile");
  }
  return passes;
}

// The common first arguments of operators. `covers` is true if the first pass has every query in a
// tile. `ordered` asks for sums of a row in the order of its keys, whatever else the call computes.
#define SPARSERING_CALL                                                                          \
  const Tensor &query, const Tensor &key, const Tensor &value, const std::optional<Tensor>&bias, \
      const Tensor &first_entry, Tensors tensors, Tensors places, Ints steps, Ints branches,     \
      bool covers, int64_t block, double scale, double softcap,                                  \
      const std::optional<Tensor>&distance_bias, double dropout_p,                               \
      const std::optional<Tensor>&seeds, const std::optional<Tensor>&key_mask,                   \
      Tensors coordinates, bool in_float32, bool ordered, Ints walked

// Sets, for each pass, the bitmap row of the call's first query; 0 if `slots` is empty.
void set_slots(std::vector<Pass>& passes, Ints slots, int64_t queries) {
  for (size_t i = 0; !slots.empty() && i < passes.size(); ++i) {
    SPARSERING_CHECK(
        slots.size() == passes.size() && slots[i] >= 0 && slots[i] + queries <= passes[i].block,
        "sparsering cpu: malformed layout: slots past the end of a tile");
    passes[i].slot = slots[i];
  }
}

std::tuple<Tensor, Tensor> attend(const Problem& x, const std::vector<Pass>& passes, bool covers,
                                  bool in_float32, const std::optional<Tensor>& sink) {
  const Dtype of_out = in_float32 ? kFloat : x.q.type;
  Tensor out =
      covers ? empty({x.B, x.Hq, x.Nq, x.Dv}, of_out) : zeros({x.B, x.Hq, x.Nq, x.Dv}, of_out);
  Tensor lse = empty({x.B, x.Hq, x.Nq}, kFloat);
  if (sink) {
    copy(lse, *sink);  // results will be merged into rows with out = 0 and lse = sink
  } else {
    std::fill_n(lse.mutable_data_ptr<float>(), lse.numel(), -kInf);
  }
  if (lse.numel() == 0) {
    return {out, lse};
  }
  if (x.q.type == kBFloat16 && has_bfloat16_products() && !x.k.is_stored()) {
    Forward<BFloat16>(x, passes).run(covers, out, lse);
  } else {
    Forward<float>(x, passes).run(covers, out, lse);
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor> forward(SPARSERING_CALL, const std::optional<Tensor>& sink, Ints slots) {
  const Order order(ordered);
  const Extras extras(softcap, distance_bias, dropout_p, seeds, key_mask, coordinates,
                      query.size(0), query.size(1), query.size(2), key.size(2));
  const Tensor dense[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  const Problem x(dense[0], dense[1], dense[2], bias, extras, first_entry, steps.size(), block,
                  scale);
  std::vector<Pass> passes = passes_of(x, tensors, places, steps, branches, walked);
  set_slots(passes, slots, x.Nq);
  return attend(x, passes, covers, in_float32, sink);
}

Tensor lay(Tensors tensors, Ints steps, Ints branches, bool covers, int64_t block, double scale,
           Ints walked) {
  SPARSERING_CHECK(tensors.size() == steps.size() * Pass::kTensors &&
                       branches.size() == steps.size() && walked.size() == steps.size(),
                   "sparsering cpu: malformed layout: tensors missing");
  auto laid = std::make_unique<Laid>();
  laid->tensors.assign(tensors.begin(), tensors.end());
  laid->first_entry = zeros({static_cast<int64_t>(steps.size()), 1, 1}, kLong);
  laid->block = block, laid->covers = covers, laid->scale = scale;
  laid->count_versions();
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto of_pass = Tensors(laid->tensors).subspan(i * Pass::kTensors, Pass::kTensors);
    Pass& p = laid->passes.emplace_back(of_pass, Tensors(), steps[i], block, branches[i]);
    p.walked = walked[i];
    check_pass(of_pass, p, kAny, kAny, p.batches, p.tables, p.axes);
    for (int64_t t = 0; t < p.axes * p.rows; ++t) {
      laid->queries =
          std::max(laid->queries, p.query_start[t] < p.query_stop[t] ? p.query_stop[t] : 0);
    }
    for (int64_t t = 0; t < p.axes * p.columns; ++t) {
      laid->keys = std::max(laid->keys, p.key_start[t] < p.key_stop[t] ? p.key_stop[t] : 0);
    }
  }
  Tensor holder = laid->holder();
  laid.release();
  return holder;
}

std::tuple<Tensor, Tensor> forward_laid(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const Tensor& layout, bool ordered, Ints slots) {
  const Order order(ordered);
  const Laid& laid = Laid::of(layout);
  const Tensor dense[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  const Problem x(dense[0], dense[1], dense[2], {}, Extras(), laid.first_entry, laid.passes.size(),
                  laid.block, laid.scale);
  bool fits = laid.queries <= x.Nq && laid.keys <= x.Nk && laid.versions == laid.versions_now();
  for (const Pass& p : laid.passes) {
    fits = fits && (p.batches == 1 || p.batches == x.B) && (p.axes == 1 || p.axes == x.Hkv) &&
           (x.Hq == 0 || (p.tables > 0 && x.Hq % p.tables == 0));
  }
  for (size_t i = 0; !fits && i < laid.passes.size(); ++i) {  // one of these checks raises
    const auto of_pass = Tensors(laid.tensors).subspan(i * Pass::kTensors, Pass::kTensors);
    check_pass(of_pass, laid.passes[i], x.Nq, x.Nk, x.B, x.Hq, x.Hkv);
  }
  if (slots.empty()) {
    return attend(x, laid.passes, laid.covers, false, {});
  }
  std::vector<Pass> passes = laid.passes;
  set_slots(passes, slots, x.Nq);
  return attend(x, passes, laid.covers, false, {});
}

// Copies rows [B, H, n, width] into the tensor `held`, beginning at row `first`, which is one
// number for all heads or one per head.
void put(const Tensor& held, const Tensor& rows, Ints first) {
  const Tensor from = dense_rows(rows);
  const int64_t B = held.size(0), H = held.size(1), width = held.size(3), n = rows.size(2);
  const int64_t bytes = width * held.element_size(), heads = first.size();
  SPARSERING_CHECK(from.has_sizes({B, H, n, width}) && from.dtype() == held.dtype() &&
                       held.stride(3) <= 1 && (heads == 1 || heads == H),
                   "sparsering cpu: new rows do not fit those that are held");
  for (const int64_t row : first) {
    SPARSERING_CHECK(row >= 0 && row + n <= held.size(2),
                     "sparsering cpu: new rows lie past those that are held");
  }
  const Source to(held), source(from);
  for (int64_t i = 0; i < B * H * n; ++i) {
    const int64_t b = i / (H * n), h = i / n % H, row = i % n;
    std::copy_n(source.rows<char>(b, h, row), bytes,
                const_cast<char*>(to.rows<char>(b, h, first[heads == 1 ? 0 : h] + row)));
  }
}

// Copies new keys and values into key and value from rows `first` on, and runs `forward`.
std::tuple<Tensor, Tensor> forward_after(const Tensor& new_key, const Tensor& new_value, Ints first,
                                         SPARSERING_CALL, const std::optional<Tensor>& sink,
                                         Ints slots) {
  put(key, new_key, first);
  put(value, new_value, first);
  return forward(query, key, value, bias, first_entry, tensors, places, steps, branches, covers,
                 block, scale, softcap, distance_bias, dropout_p, seeds, key_mask, coordinates,
                 in_float32, ordered, walked, sink, slots);
}

std::tuple<Tensor, Tensor> forward_laid_after(const Tensor& new_key, const Tensor& new_value,
                                              Ints first, const Tensor& query, const Tensor& key,
                                              const Tensor& value, const Tensor& layout,
                                              bool ordered, Ints slots) {
  put(key, new_key, first);
  put(value, new_value, first);
  return forward_laid(query, key, value, layout, ordered, slots);
}

// Computes the gradients by run_heads if `transposes` is empty, else by run_tiles. The last two are
// those of coordinates, see Backward.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    SPARSERING_CALL, const Tensor& out, const Tensor& lse, const Tensor& grad_out,
    const Tensor& grad_lse, Tensors transposes, bool learns_distances, bool learns_coordinates) {
  const Order order(ordered);
  const Extras extras(softcap, distance_bias, dropout_p, seeds, key_mask, coordinates,
                      query.size(0), query.size(1), query.size(2), key.size(2));
  const Tensor dense[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  const Problem x(dense[0], dense[1], dense[2], bias, extras, first_entry, steps.size(), block,
                  scale);
  x.check_is_whole();
  const std::vector<Pass> passes = passes_of(x, tensors, places, steps, branches, walked);
  std::vector<Transpose> by_key;
  for (size_t i = 0; !transposes.empty() && i < passes.size(); ++i) {
    const auto of_pass = transposes.subspan(i * Transpose::kTensors, Transpose::kTensors);
    if (!passes[i].walked) {
      check_transpose(of_pass, passes[i]);
    }
    by_key.emplace_back(of_pass);
  }
  const Dtype type = in_float32 ? kFloat : x.q.type;
  Tensor dq = empty(query.sizes(), type), dk = empty(key.sizes(), type),
         dv = empty(value.sizes(), type);
  Tensor dbias = bias ? zeros(bias->sizes(), kFloat) : empty({0}, kFloat);
  for (const Tensor& like : {grad_out, out}) {
    SPARSERING_CHECK(like.has_sizes({x.B, x.Hq, x.Nq, x.Dv}) && like.dtype() == query.dtype(),
                     "sparsering cpu: out and its gradient must be as forward made them");
  }
  for (const Tensor& like : {grad_lse, lse}) {
    SPARSERING_CHECK(
        like.has_sizes({x.B, x.Hq, x.Nq}) && like.dtype() == kFloat && like.is_contiguous(),
        "sparsering cpu: lse and its gradient must be as forward made them");
  }
  Tensor delta = empty(grad_lse.sizes(), kFloat);
  // A head's gradient of the distance table is summed in several groups, so that all threads work.
  const int64_t wanted = 4 * num_threads() / std::max<int64_t>(1, x.B * x.Hq) + 1;
  const int64_t groups = by_key.empty() ? 1 : wanted;
  const int64_t distances = distance_bias && learns_distances ? distance_bias->size(2) : 0;
  Tensor dtable = zeros({x.B, x.Hq, groups, distances}, kDouble);
  const int64_t dims = learns_coordinates ? extras.coordinates.dims : 0;
  Tensor of_queries = zeros({x.B, x.Hq, dims ? x.Nq : 0, dims + 1}, kFloat),
         of_keys = zeros({x.B, x.Hkv, x.Nk, dims}, kFloat);
  if (lse.numel() == 0) {
    clear(dq), clear(dk), clear(dv);
    return {dq, dk, dv, dbias, dtable, delta, of_queries, of_keys};
  }
  const Delta delta_of(x, grad_out, out, grad_lse);
  float *queries_to = dims ? of_queries.mutable_data_ptr<float>() : nullptr,
        *keys_to = dims ? of_keys.mutable_data_ptr<float>() : nullptr;
  const auto run = [&](auto kernel) {
    if (by_key.empty()) {
      kernel.run_heads();
    } else {
      kernel.run_tiles(by_key);
    }
  };
  if (query.dtype() == kBFloat16 && has_bfloat16_products()) {
    run(Backward<BFloat16>(x, passes, delta_of, grad_out, lse, delta, dq, dk, dv, dbias, dtable,
                           queries_to, keys_to));
  } else {
    run(Backward<float>(x, passes, delta_of, grad_out, lse, delta, dq, dk, dv, dbias, dtable,
                        queries_to, keys_to));
  }
  return {dq, dk, dv, dbias, dtable, delta, of_queries, of_keys};
}

// The arguments of tangents of a call's tensors, which follow those of SPARSERING_CALL. `lse_t` is
// changed: it gets what the pairs add to it.
#define SPARSERING_MOVES                                                               \
  const Tensor &lse, const Tensor &lse_t, const std::optional<Tensor>&query_t,         \
      const std::optional<Tensor>&key_t, const std::optional<Tensor>&value_t,          \
      const std::optional<Tensor>&bias_t, const std::optional<Tensor>&distance_bias_t, \
      const std::optional<Tensor>&out

// A call of which tangents are asked, for the two operators that follow.
struct MovedCall {
  MovedCall(SPARSERING_CALL, SPARSERING_MOVES)
      : extras(softcap, distance_bias, dropout_p, seeds, key_mask, coordinates, query.size(0),
               query.size(1), query.size(2), key.size(2)),
        dense{dense_rows(query), dense_rows(key), dense_rows(value)},
        x(dense[0], dense[1], dense[2], bias, extras, first_entry, steps.size(), block, scale),
        passes(passes_of(x, tensors, places, steps, branches, walked)) {
    x.check_is_whole();
    x.check_has_no_coordinates();
    SPARSERING_CHECK(!out || passes.size() == 1, "sparsering cpu: out is for calls of one pass");
    moves.q = rows_of(query_t, query.sizes());
    moves.k = rows_of(key_t, key.sizes());
    moves.v = rows_of(value_t, value.sizes());
    moves.bias = numbers_of(bias_t, bias);
    moves.table = numbers_of(distance_bias_t, distance_bias);
    const int64_t sizes[] = {x.B, x.Hq, x.Nq, x.Dv};
    of_out = rows_of(out, sizes);
    rows.lse = row_numbers(lse);
    rows.lse_t = row_numbers(lse_t);
  }

  std::optional<Source> rows_of(const std::optional<Tensor>& given, Ints sizes) {
    if (!given) {
      return {};
    }
    SPARSERING_CHECK(
        given->has_sizes(sizes) &&
            (given->dtype() == kFloat || given->dtype() == kBFloat16 || given->dtype() == kHalf),
        "sparsering cpu: rows must have the shape of those that they belong to");
    held.push_back(dense_rows(*given));
    return Source(held.back());
  }
  float* row_numbers(const Tensor& given) const {
    SPARSERING_CHECK(
        given.has_sizes({x.B, x.Hq, x.Nq}) && given.dtype() == kFloat && given.is_contiguous(),
        "sparsering cpu: numbers of rows must be contiguous float [B, Hq, Nq]");
    return given.mutable_data_ptr<float>();
  }
  static const float* numbers_of(const std::optional<Tensor>& given,
                                 const std::optional<Tensor>& like) {
    SPARSERING_CHECK(!given || (like && given->has_sizes(like->sizes()) &&
                                given->dtype() == kFloat && given->is_contiguous()),
                     "sparsering cpu: a bias moves by contiguous floats of its own shape");
    return given ? values_of<float>(*given) : nullptr;
  }

  const Extras extras;
  const Tensor dense[3];
  const Problem x;
  const std::vector<Pass> passes;
  std::vector<Tensor> held;
  Moves moves;
  RowNumbers rows = {};
  std::optional<Source> of_out;
};

#define SPARSERING_CALL_ARGUMENTS                                                               \
  query, key, value, bias, first_entry, tensors, places, steps, branches, covers, block, scale, \
      softcap, distance_bias, dropout_p, seeds, key_mask, coordinates, in_float32, ordered, walked
#define SPARSERING_MOVES_ARGUMENTS lse, lse_t, query_t, key_t, value_t, bias_t, distance_bias_t, out

// Returns the tangent of out, or its sums over pairs if `out` is not given: [B, Hq, Nq, Dv].
Tensor tangent(SPARSERING_CALL, SPARSERING_MOVES) {
  const MovedCall call(SPARSERING_CALL_ARGUMENTS, SPARSERING_MOVES_ARGUMENTS);
  const Problem& x = call.x;
  Tensor moved = zeros({x.B, x.Hq, x.Nq, x.Dv}, kFloat);
  if (lse.numel()) {
    SecondOrder(x, call.passes, call.moves, call.rows, call.of_out, moved.mutable_data_ptr<float>(),
                nullptr)
        .run();
  }
  return moved;
}

// Returns the tangents of the gradients (as `backward` returns these), and that of out, which is
// computed first if `out` is given; numbers of rows are then added to `lse_t`, `delta` and
// `delta_t`.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> tangent_of_gradients(
    SPARSERING_CALL, SPARSERING_MOVES, const Tensor& grad_out,
    const std::optional<Tensor>& grad_out_t, const Tensor& delta, const Tensor& delta_t,
    bool learns_distances) {
  MovedCall call(SPARSERING_CALL_ARGUMENTS, SPARSERING_MOVES_ARGUMENTS);
  const Problem& x = call.x;
  const Dtype type = in_float32 ? kFloat : x.q.type;
  Tensor dq = empty(query.sizes(), type), dk = empty(key.sizes(), type),
         dv = empty(value.sizes(), type);
  Tensor dbias = bias ? zeros(bias->sizes(), kFloat) : empty({0}, kFloat);
  const int64_t distances = distance_bias && learns_distances ? distance_bias->size(2) : 0;
  Tensor dtable = zeros({x.B, x.Hq, SecondOrder::shares(x.B * x.Hkv), distances}, kDouble);
  const int64_t sizes[] = {x.B, x.Hq, x.Nq, x.Dv};
  Tensor moved = out ? zeros(sizes, kFloat) : empty({0}, kFloat);
  call.rows.delta = call.row_numbers(delta);
  call.rows.delta_t = call.row_numbers(delta_t);
  const MovedGradients to{*call.rows_of(grad_out, sizes),
                          call.rows_of(grad_out_t, sizes),
                          dq,
                          dk,
                          dv,
                          bias ? dbias.mutable_data_ptr<float>() : nullptr,
                          distances ? dtable.mutable_data_ptr<double>() : nullptr};
  if (lse.numel() == 0) {
    clear(dq), clear(dk), clear(dv);
  } else {
    SecondOrder(x, call.passes, call.moves, call.rows, call.of_out,
                out ? moved.mutable_data_ptr<float>() : nullptr, &to)
        .run();
  }
  return {dq, dk, dv, dbias, dtable, moved};
}

// Returns the sum of the softmax weights in each block, [B, Hq, blocks]. It loops over key tiles.
Tensor mass(SPARSERING_CALL, const Tensor& lse, const std::optional<Tensor>& weight,
            int64_t blocks) {
  const Order order(ordered);
  const Extras extras(softcap, distance_bias, dropout_p, seeds, key_mask, coordinates,
                      query.size(0), query.size(1), query.size(2), key.size(2));
  const Tensor dense[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  Problem x(dense[0], dense[1], dense[2], bias, extras, first_entry, steps.size(), block, scale);
  x.check_is_whole();
  x.check_has_no_coordinates();
  SPARSERING_CHECK(blocks > 0 && (!bias || x.blocks == blocks),
                   "sparsering cpu: a bias and masses are of as many blocks");
  x.blocks = blocks;
  const std::vector<Pass> passes = passes_of(x, tensors, places, steps, branches, walked);
  for (const Tensor& like : {lse, weight.value_or(lse)}) {
    SPARSERING_CHECK(
        like.has_sizes({x.B, x.Hq, x.Nq}) && like.dtype() == kFloat && like.is_contiguous(),
        "sparsering cpu: lse and weights must be contiguous float [B, Hq, Nq]");
  }
  Tensor result = zeros({x.B, x.Hq, blocks}, kFloat);
  if (lse.numel() == 0) {
    return result;
  }
  const float* weights = weight ? values_of<float>(*weight) : nullptr;
  const auto run = [&](const auto& kernel) {
    for (size_t i = 0; i < passes.size(); ++i) {
      kernel.run(passes[i], i);
    }
  };
  if (query.dtype() == kBFloat16 && has_bfloat16_products()) {
    run(Mass<BFloat16>(x, values_of<float>(lse), weights, result.mutable_data_ptr<float>()));
  } else {
    run(Mass<float>(x, values_of<float>(lse), weights, result.mutable_data_ptr<float>()));
  }
  return result;
}

bool shares(const Tensor& query, const Tensor& feature, const Tensor& key,
            const std::optional<Tensor>& last, const Tensor& out, int64_t kind, double scale,
            double log_part, int64_t blocks, int64_t length, int64_t first_own, int64_t first_query,
            int64_t first, int64_t offset, int64_t count, int64_t width, int64_t row, bool causal) {
  const Tensor dense[] = {dense_rows(query), dense_rows(feature), dense_rows(key)};
  const Operands operands(dense[0], dense[1], dense[2], kind, static_cast<float>(scale), first_own,
                          first_query);
  const Shares x(operands, last, static_cast<float>(log_part), blocks, length, first, offset, count,
                 width, row, causal);
  return block_shares(x, out);
}

}  // namespace

#define SPARSERING_SCHEMA(key, value)                                                        \
  "Tensor query, " key ", " value                                                            \
  ", Tensor? bias, Tensor first_entry, Tensor[] passes, "                                    \
  "Tensor[] places, int[] steps, int[] branches, bool covers, int block, float scale, "      \
  "float softcap, Tensor? distance_bias, float dropout_p, Tensor? seeds, Tensor? key_mask, " \
  "Tensor[] coordinates, bool in_float32, bool ordered, int[] walked, "

#define SPARSERING_MOVES_SCHEMA                                                     \
  "Tensor lse, Tensor(a!) lse_t, Tensor? query_t, Tensor? key_t, Tensor? value_t, " \
  "Tensor? bias_t, Tensor? distance_bias_t, Tensor? out"

const bool registered = [] {
  Operators m(SPARSERING_NAMESPACE);  // of ground/namespace.py, by a flag
  m.define<forward>("forward(" SPARSERING_SCHEMA(
      "Tensor key", "Tensor value") "Tensor? sink, int[] slots) -> (Tensor, Tensor)");
  m.define<forward_after>(
      "forward_after(Tensor new_key, Tensor new_value, int[] first, " SPARSERING_SCHEMA(
          "Tensor(a!) key", "Tensor(b!) value") "Tensor? sink, int[] slots) -> (Tensor, Tensor)");
  m.define<lay>(
      "lay(Tensor[] passes, int[] steps, int[] branches, bool covers, int block, float scale, "
      "int[] walked) -> Tensor");
  m.define<forward_laid>(
      "forward_laid(Tensor query, Tensor key, Tensor value, Tensor layout, bool ordered, "
      "int[] slots) -> (Tensor, Tensor)");
  m.define<forward_laid_after>(
      "forward_laid_after(Tensor new_key, Tensor new_value, int[] first, Tensor query, "
      "Tensor(a!) key, Tensor(b!) value, Tensor layout, bool ordered, int[] slots) -> (Tensor, "
      "Tensor)");
  m.define<backward>("backward(" SPARSERING_SCHEMA(
      "Tensor key",
      "Tensor value") "Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse, Tensor[] "
                      "transposes, "
                      "bool learns_distances, bool learns_coordinates) -> "
                      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.define<tangent>("tangent(" SPARSERING_SCHEMA("Tensor key", "Tensor value")
                        SPARSERING_MOVES_SCHEMA ") -> Tensor");
  m.define<tangent_of_gradients>(
      "tangent_of_gradients(" SPARSERING_SCHEMA("Tensor key", "Tensor value")
          SPARSERING_MOVES_SCHEMA
      ", Tensor grad_out, Tensor? grad_out_t, Tensor(b!) delta, Tensor(c!) delta_t, "
      "bool learns_distances) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.define<mass>("mass(" SPARSERING_SCHEMA(
      "Tensor key", "Tensor value") "Tensor lse, Tensor? weight, int blocks) -> Tensor");
  m.define<lists::forward_lists>("forward_lists(" SPARSERING_LISTS_SCHEMA
                                 "bool fresh, Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.define<lists::backward_lists>(
      "backward_lists(" SPARSERING_LISTS_SCHEMA
      "Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse, bool learns_distances, "
      "bool learns_coordinates) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.define<workspace_bytes>(
      "workspace_bytes(Tensor query, Tensor key, Tensor value, int block, float[] counts, "
      "bool backward, bool by_head) -> int");
  m.define<lower::tiles>(
      "tiles(int step, int segment, int residues, int block, int offset, int[] ranges, "
      "int[] documents, int[] depths) -> Tensor[]");
  m.define<lower::table>(
      "table(int[] program, Tensor[] constants, Tensor[] queries, Tensor[] keys, int step, "
      "int block, bool count, int threads) -> Tensor[]");
  m.define<lower::page>(
      "page(int[] programs, Tensor[] constants, Tensor first, Tensor keys, int queries, "
      "int block) -> Tensor[]");
  m.define<lower::transposed>("transposed(Tensor bitmaps) -> Tensor");
  m.define<store>("store(Tensor rows, bool float8) -> Tensor");
  m.define<pieces>("pieces(Tensor entries, Tensor segments, bool by_key) -> int");
  m.define<shares>(
      "shares(Tensor query, Tensor feature, Tensor key, Tensor? last, Tensor(a!) out, int kind, "
      "float scale, float log_part, int blocks, int length, int first_own, int first_query, "
      "int first, int offset, int count, int width, int row, bool causal) -> bool");
  return true;
}();

// Repeats a product of tiles, so that `python -m benchmarks ceiling` can time it through ctypes.
template <typename T>
void repeat_product(int64_t times, int64_t M, int64_t N, int64_t K, const T* A, const T* B,
                    float* C) {
  for (int64_t i = 0; i < times; ++i) {
    multiply(M, N, K, A, K, B, C, false);
  }
  release_products();
}

extern "C" [[gnu::visibility("default")]] void sparsering_repeat_product(int64_t times, int64_t M,
                                                                         int64_t N, int64_t K,
                                                                         const float* A,
                                                                         const float* B, float* C) {
  repeat_product(times, M, N, K, A, B, C);
}
// Repeats a product of bfloat16 tiles; returns false if torch cannot multiply bfloat16.
extern "C" [[gnu::visibility("default")]] bool sparsering_repeat_bfloat16_product(
    int64_t times, int64_t M, int64_t N, int64_t K, const BFloat16* A, const BFloat16* B,
    float* C) {
  if (!multiplies_pairs()) {
    return false;
  }
  repeat_product(times, M, N, K, A, B, C);
  return true;
}

}  // namespace sparsering::cpu
