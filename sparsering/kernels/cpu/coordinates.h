// Lowers scores by the distances of tokens in space, and sums the gradients of coordinates.
//
// A tile of scores has a row for each token of one side, a key or a query, with a lane for each
// token of the other side. The lanes' coordinates are copied; those of a row's token are read
// where they are. The functions over a tile are never inlined, because the compiler would then
// leave other functions out of line, such as the tanh of a softcap, whose time doubles.

#pragma once

#include "scores.h"
#include "softmax.h"

namespace sparsering::cpu {

// The coordinates of the tokens in lanes: a line of `ld` numbers for each number of a token.
struct Lanes {
  const float* data;
  int64_t ld;
};

// Copies the coordinates of a tile's tokens to lines of `ld` numbers, padded with zeros.
inline Lanes read_lanes(const Coordinates& x, const Coordinates::Of& of, int64_t b, Tile tile,
                        int64_t step, int64_t ld, float* to) {
  const float* from = of.at(b, tile.start).data;
  for (int64_t row = 0; row < x.rows(); ++row) {
    for (int64_t i = 0; i < tile.count; ++i) {
      to[row * ld + i] = from[row * of.tokens + i * step];
    }
    std::fill(to + row * ld + tile.count, to + (row + 1) * ld, 0.f);
  }
  return {to, ld};
}

// The difference between the tokens in lanes, from `i` on, and a token, in dimension `d`.
template <int kParts>
Vec apart(const Coordinates& x, const Lanes& lanes, const Coordinates::Spot& spot, int64_t d,
          int64_t i) {
  Vec result = Vec::loadu(lanes.data + d * lanes.ld + i) - Vec(spot.data[d * spot.stride]);
  if constexpr (kParts == 2) {
    const int64_t row = x.dims + d;
    result =
        result + (Vec::loadu(lanes.data + row * lanes.ld + i) - Vec(spot.data[row * spot.stride]));
  }
  return result;
}

// The distances of the tokens in lanes, from `i` on, from a token.
template <int kParts>
Vec distances(const Coordinates& x, const Lanes& lanes, const Coordinates::Spot& spot, int64_t i) {
  Vec sum(0.f);
  for (int64_t d = 0; d < x.dims; ++d) {
    const Vec of_dim = apart<kParts>(x, lanes, spot, d, i);
    sum = at::vec::fmadd(of_dim, of_dim, sum);
  }
  return sum.sqrt();
}

// Calls f with the number of parts of coordinates as a constant.
template <typename F>
void with_parts(const Coordinates& x, const F& f) {
  if (x.parts == 1) {
    f(std::integral_constant<int, 1>());
  } else {
    f(std::integral_constant<int, 2>());
  }
}

// Lowers the scores of `count` tokens, each a row of `size` lanes, `ld` apart. Token j is at
// `spot(j)`.
template <typename At>
[[gnu::noinline]] void lower_by_distance(const Coordinates& x, const Lanes& lanes, float slope,
                                         const At& spot, int64_t count, int64_t size, int64_t ld,
                                         float* scores) {
  const Vec factor(-slope);
  with_parts(x, [&](auto parts) {
    for (int64_t j = 0; j < count; ++j) {
      const Coordinates::Spot from = spot(j);
      float* row = scores + j * ld;
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t n = std::min(kLanes, size - i);
        const Vec far = distances<parts()>(x, lanes, from, i);
        at::vec::fmadd(factor, far, Vec::loadu(row + i, n)).store(row + i, n);
      }
    }
  });
}

// Sums of gradients of coordinates and slopes.
struct CoordinateSums {
  float* lanes;  // lines like those of `Lanes`, one for each dim, then sums of dS * distance
  float* units;  // a line of spare memory
};

// Adds the gradients of coordinates and slopes for rows of dS, as `lower_by_distance` has them, dS
// by scaled scores and `slope` by these. `put(j)` is where the token of row j has its gradient, in
// neighboring floats; nullptr leaves it out. Pairs with dS = 0, such as hidden ones, add nothing.
template <typename At, typename Put>
[[gnu::noinline]] void add_coordinate_gradients(const Coordinates& x, const Lanes& lanes,
                                                float slope, const At& spot, int64_t count,
                                                int64_t size, int64_t ld, const float* ds,
                                                const CoordinateSums& sums, const Put& put) {
  const Vec zero(0.f), factor(-slope);
  float* products = sums.lanes + x.dims * lanes.ld;
  with_parts(x, [&](auto parts) {
    for (int64_t j = 0; j < count; ++j) {
      const Coordinates::Spot from = spot(j);
      const float* row = ds + j * ld;
      for (int64_t i = 0; i < size; i += kLanes) {
        const Vec of = Vec::loadu(row + i, std::min(kLanes, size - i)),
                  far = distances<parts()>(x, lanes, from, i);
        const Vec product = Vec::blendv(of * far, zero, of == zero);
        (Vec::loadu(products + i) + product).store(products + i);
        const Vec unit = Vec::blendv(of * factor / far, zero, of == zero);
        Vec::blendv(unit, zero, far == zero).store(sums.units + i);
      }
      float* to = put(j);
      for (int64_t d = 0; d < x.dims; ++d) {
        Vec total(0.f);
        float* of_dim = sums.lanes + d * lanes.ld;
        for (int64_t i = 0; i < size; i += kLanes) {
          const Vec unit = Vec::loadu(sums.units + i);
          const Vec part =
              Vec::blendv(unit * apart<parts()>(x, lanes, from, d, i), zero, unit == zero);
          (Vec::loadu(of_dim + i) + part).store(of_dim + i);
          total = total + part;
        }
        if (to) {
          to[d] -= sum_of_lanes(total);
        }
      }
    }
  });
}

}  // namespace sparsering::cpu
