// Matrix products. torch has products of blocks (brgemm of oneDNN, for AVX-512 and AMX), but not in
// its stable ABI, so they are looked up by name when the kernel is loaded. In a torch without them,
// loops over vectors take their place, and bfloat16 is multiplied as float. A call `in_order` uses
// loops of our own, which add in an order that does not depend on how keys are cut.

#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>

#include "pairs_in_order.h"
#include "tiles.h"

#if defined(__APPLE__)
#define SIX_INT64 "xxxxxx"  // int64_t is long long
#else
#define SIX_INT64 "llllll"
#endif

namespace sparsering::cpu {

// Functions of torch outside its stable ABI, or nullptr. Mangled names contain the parameters, so a
// torch that changes those does not have the name.
struct Found {
  template <typename T>
  using Product = void (*)(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc,
                           bool add, const T* A, const T* B, float* C, bool paired);

  Found() {
    look_up(multiply, "_ZN2at6native7cpublas6brgemmE" SIX_INT64 "bPKfS3_Pfb");
    look_up(multiply_pairs, "_ZN2at6native7cpublas6brgemmE" SIX_INT64 "bPKN3c108BFloat16ES5_Pfb");
    look_up(release, "_ZN2at6native7cpublas14brgemm_releaseEb");
    look_up(context, "_ZN2at13globalContextEv");
    look_up(uses_onednn, "_ZNK2at7Context17userEnabledMkldnnEv");
    look_up(version, "_ZNK2at10TensorBase8_versionEv");
  }

  Product<float> multiply = nullptr;
  Product<BFloat16> multiply_pairs = nullptr;
  void (*release)(bool paired) = nullptr;
  void* (*context)() = nullptr;
  bool (*uses_onednn)(const void* context) = nullptr;
  int64_t (*version)(AtenTensorHandle) = nullptr;
};

inline const Found& found() {
  static const Found functions;
  return functions;
}

// Returns a tensor's version, a number that every in-place change increases.
inline int64_t version_of(AtenTensorHandle x) {
  if (found().version) {
    return found().version(x);
  }
  StableIValue stack[1];
  AtenTensorHandle own;
  checked(aoti_torch_new_tensor_handle(x, &own));
  stack[0] = on_stack(own);
  call("aten::_version", "", stack);
  return from_stack<int64_t>(stack[0]);
}

// False if torch has no products of bfloat16, or the user has turned oneDNN off.
inline bool multiplies_pairs() {
  const Found& f = found();
  return f.multiply_pairs && (!f.context || !f.uses_onednn || f.uses_onednn(f.context()));
}

// True if this thread's tile registers are set up for multiply_tiles.
inline bool& own_tiles() {
  static thread_local bool own = false;
  return own;
}

// True in this thread if a row's sums must be in the order of its keys, whatever else the call
// computes (docs/invariance.md).
inline bool& in_order() {
  static thread_local bool value = false;
  return value;
}

// Sets `in_order` of this thread during the object's lifetime.
class Order {
 public:
  explicit Order(bool value) : before_(in_order()) {
    in_order() = value;
  }
  ~Order() {
    in_order() = before_;
  }
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;

 private:
  const bool before_;
};

// Ends this thread's use of the processor's tile registers.
inline void release_products() {
  own_tiles() = false;
  if (found().release) {
    found().release(true);
  }
}

// Computes R rows and W vectors of columns of C = A B, or C + A B if `add`. The last vector has
// `last` columns. Each value is one sum in the order of k; with `add` it begins at C.
template <int R, int W>
inline void multiply_registers(int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb,
                               float* C, int64_t ldc, bool add, int64_t last) {
  using Floats = at::vec::Vectorized<float>;
  constexpr int64_t lanes = Floats::size();
  const auto columns_of = [&](const float* from, int w) {
    return w + 1 == W && last < lanes ? Floats::loadu(from + w * lanes, last)
                                      : Floats::loadu(from + w * lanes);
  };
  Floats sum[R * W], columns[W];
#pragma GCC unroll 16
  for (int i = 0; i < R * W; ++i) {
    sum[i] = add ? columns_of(C + i / W * ldc, i % W) : Floats(0.f);
  }
  const auto add_products = [&](const auto& load) {
    for (int64_t k = 0; k < K; ++k) {
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) {
        columns[w] = load(B + k * ldb, w);
      }
#pragma GCC unroll 16
      for (int i = 0; i < R * W; ++i) {
        sum[i] = at::vec::fmadd(Floats(A[i / W * lda + k]), columns[i % W], sum[i]);
      }
    }
  };
  if (last == lanes) {
    add_products([](const float* row, int w) { return Floats::loadu(row + w * lanes); });
  } else {
    add_products(columns_of);
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * W; ++i) {
    sum[i].store(C + i / W * ldc + i % W * lanes, i % W + 1 == W ? last : lanes);
  }
}

// Computes W vectors of columns of C = A B, or C + A B if `add`.
template <int W>
inline void multiply_columns(int64_t M, int64_t K, const float* A, int64_t lda, const float* B,
                             int64_t ldb, float* C, int64_t ldc, bool add, int64_t last) {
  constexpr int kRows = at::vec::Vectorized<float>::size() > 8 ? 8 : W > 1 ? 4 : 8;  // measured
  int64_t i = 0;
  for (; i + kRows <= M; i += kRows) {
    multiply_registers<kRows, W>(K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, add, last);
  }
  for (; i + 4 <= M; i += 4) {
    multiply_registers<4, W>(K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, add, last);
  }
  for (; i < M; ++i) {
    multiply_registers<1, W>(K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, add, last);
  }
}

// Computes C = A B, or C + A B if `add`. With `in_order`, each value is one sum in the order of k
// that begins at C, so that the bits do not depend on how a product is cut along k. torch's
// products are faster, but begin at 0 and add C at the end.
inline void multiply_blocks(int64_t M, int64_t N, int64_t K, const float* A, int64_t lda,
                            const float* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  constexpr int64_t lanes = at::vec::Vectorized<float>::size();
  const bool small = lanes == 8 && M * N * K <= 16 * 16 * 128;  // torch is slower for these
  if (!(add && in_order()) && found().multiply && !small) {
    found().multiply(M, N, K, lda, ldb, ldc, add, A, B, C, false);
    return;
  }
  for (int64_t j = 0; j < N;) {
    if (const int64_t rest = N - j; rest > lanes) {
      const int64_t last = std::min(lanes, rest - lanes);
      multiply_columns<2>(M, K, A, lda, B + j, ldb, C + j, ldc, add, last);
      j += lanes + last;
    } else {
      multiply_columns<1>(M, K, A, lda, B + j, ldb, C + j, ldc, add, rest);
      j += rest;
    }
  }
}
inline void multiply_blocks(int64_t M, int64_t N, int64_t K, const BFloat16* A, int64_t lda,
                            const BFloat16* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  if (!found().multiply_pairs) {
    throw std::runtime_error("sparsering cpu: torch multiplies no bfloat16");
  }
  // torch's products without tile registers add in the order of k, but add C at the end.
  if (in_order() && (add || has_tiles())) {
    multiply_pairs_in_order(M, N, K, A, lda, B, ldb, C, ldc, add);
    return;
  }
  // torch remembers how it set the tile registers up; after a release, it sets them up again.
  if (found().release && fits_tiles(M, N, K)) {
    if (!own_tiles()) {
      release_products();
      set_up_tiles();
      own_tiles() = true;
    }
    multiply_tiles(M, N, K, A, lda, B, ldb, C, ldc, add);
    return;
  }
  if (own_tiles()) {
    release_products();
  }
  found().multiply_pairs(M, N, K, lda, ldb, ldc, add, A, B, C, true);
}

}  // namespace sparsering::cpu
