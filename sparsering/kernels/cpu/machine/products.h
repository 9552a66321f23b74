// Matrix products. torch has products of blocks (brgemm of oneDNN: AVX-512, AMX), but not in its
// stable ABI. They are looked up by name when the kernel is loaded; in a torch without them, loops
// over vectors take their place, and bfloat16 is multiplied as float.

#pragma once

#include <ATen/cpu/vec/vec.h>

#include "tiles.h"

#if defined(__APPLE__)
#define SIX_INT64 "xxxxxx"  // int64_t is long long
#else
#define SIX_INT64 "llllll"
#endif

namespace sparsering::cpu {

// Functions of torch outside its stable ABI, or nullptr. Their mangled names hold their parameters;
// a torch that changes those has no such name.
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

// Returns a tensor's version, which every change of its values raises.
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

// False if torch lacks products of bfloat16, or its user has switched oneDNN off.
inline bool multiplies_pairs() {
  const Found& f = found();
  return f.multiply_pairs && (!f.context || !f.uses_onednn || f.uses_onednn(f.context()));
}

// True if this thread's tile registers are set up for multiply_tiles.
inline bool& own_tiles() {
  static thread_local bool own = false;
  return own;
}

// Ends a thread's use of a processor's tiles.
inline void release_products() {
  own_tiles() = false;
  if (found().release) {
    found().release(true);
  }
}

// Computes `R` rows of C = A B, or C + A B if `add`: 2 vectors of columns at a time.
template <int R>
void multiply_rows(int64_t N, int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb,
                   float* C, int64_t ldc, bool add) {
  using Floats = at::vec::Vectorized<float>;
  constexpr int64_t lanes = Floats::size();
  int64_t j = 0;
  for (; j + 2 * lanes <= N; j += 2 * lanes) {
    Floats sum[R][2];
    for (int r = 0; r < R; ++r) {
      for (int w = 0; w < 2; ++w) {
        sum[r][w] = add ? Floats::loadu(C + r * ldc + j + w * lanes) : Floats(0.f);
      }
    }
    for (int64_t k = 0; k < K; ++k) {
      const Floats low = Floats::loadu(B + k * ldb + j),
                   high = Floats::loadu(B + k * ldb + j + lanes);
      for (int r = 0; r < R; ++r) {
        const Floats a(A[r * lda + k]);
        sum[r][0] = at::vec::fmadd(a, low, sum[r][0]);
        sum[r][1] = at::vec::fmadd(a, high, sum[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) {
      sum[r][0].store(C + r * ldc + j);
      sum[r][1].store(C + r * ldc + j + lanes);
    }
  }
  for (; j < N; ++j) {
    for (int r = 0; r < R; ++r) {
      float sum = add ? C[r * ldc + j] : 0.f;
      for (int64_t k = 0; k < K; ++k) {
        sum += A[r * lda + k] * B[k * ldb + j];
      }
      C[r * ldc + j] = sum;
    }
  }
}

inline void multiply_blocks(int64_t M, int64_t N, int64_t K, const float* A, int64_t lda,
                            const float* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  if (found().multiply) {
    found().multiply(M, N, K, lda, ldb, ldc, add, A, B, C, false);
    return;
  }
  int64_t i = 0;
  for (; i + 4 <= M; i += 4) {
    multiply_rows<4>(N, K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, add);
  }
  for (; i < M; ++i) {
    multiply_rows<1>(N, K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, add);
  }
}
inline void multiply_blocks(int64_t M, int64_t N, int64_t K, const BFloat16* A, int64_t lda,
                            const BFloat16* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  if (!found().multiply_pairs) {
    throw std::runtime_error("sparsering cpu: torch multiplies no bfloat16");
  }
  // torch keeps account of what it has set up: its products set up again after a release
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
