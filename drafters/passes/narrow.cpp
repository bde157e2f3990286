// Passes over few tokens on a CPU, at the speed of its memory: fp32, no gradients.
//
//   linear(x, weight, bias)   at most 32 rows of x, weights row by row as they lie: each is read from
//                             memory once for all rows of x, which stay in the nearest cache
//   attend(..)                puts new keys and values into a slab and attends over its first slots,
//                             grouped queries without copies, with softcap and sinks
//
// Built by build.py with the machine's own vector instructions.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

template <int N>
struct Of {
  typedef float Floats __attribute__((vector_size(N * sizeof(float))));
};
typedef Of<LANES>::Floats Floats;
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Floats load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
inline void store(float* p, Floats v) { *reinterpret_cast<Unaligned*>(p) = v; }

template <int N>
inline float sum(typename Of<N>::Floats v) {
  if constexpr (N == 2) {
    return v[0] + v[1];
  } else {
    typename Of<N / 2>::Floats low, high;
    std::memcpy(&low, &v, sizeof(low));
    std::memcpy(&high, reinterpret_cast<char*>(&v) + sizeof(low), sizeof(high));
    return sum<N / 2>(low + high);
  }
}

// ---------------------------------------------------------------- linear

constexpr int WIDEST = 32;
constexpr int FITS = 9;      // rows of x whose sums the registers hold
constexpr int STREAMS = 4;   // rows of weights that are read side by side
constexpr int AHEAD = 1024;  // floats: how far ahead of its use a weight is asked for

// y[m][r] = x[m] . w[r] of M rows x and R rows w, which lie w_step apart.
template <int M, int R>
inline void tile(const float* x, const float* w, int64_t w_step, int64_t K, const float* bias,
                 float* y, int64_t N, int64_t y_step) {
  Floats sums[M][R] = {};
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) {
    Floats weights[R];
    for (int r = 0; r < R; r++) weights[r] = load(w + r * w_step + k);
    for (int r = 0; r < R; r++) __builtin_prefetch(w + r * w_step + k + AHEAD, 0, 2);
    for (int m = 0; m < M; m++) {
      Floats row = load(x + m * K + k);
      for (int r = 0; r < R; r++) sums[m][r] += row * weights[r];
    }
  }
  for (int m = 0; m < M; m++) {
    for (int r = 0; r < R; r++) {
      float total = sum<LANES>(sums[m][r]);
      for (int64_t j = k; j < K; j++) total += x[m * K + j] * w[r * w_step + j];
      y[m * N + r * y_step] = bias ? total + bias[r * y_step] : total;
    }
  }
}

template <typename Do, int... I>
inline void each(Do run, std::integer_sequence<int, I...>) {
  (run(std::integral_constant<int, I>()), ...);
}

// Outputs [from, to) of M rows. A thread's rows of weights are cut into R runs that are read side by
// side: each is one long stream, which the processor fetches ahead by itself. Rows of x that do not
// fit at once come in pieces, for which the weights lie in the nearest cache.
template <int M>
void outputs(const float* x, const float* w, int64_t K, const float* bias, float* y, int64_t N,
             int64_t from, int64_t to) {
  constexpr int PIECES = (M + FITS - 1) / FITS, PIECE = (M + PIECES - 1) / PIECES;
  constexpr int FIT = (REGISTERS - 2) / (PIECE + 1);
  constexpr int R = FIT > STREAMS ? STREAMS : FIT < 1 ? 1 : FIT;
  int64_t run = (to - from) / R;
  auto tiles = [&](auto streams, int64_t n) {
    constexpr int S = decltype(streams)::value;
    const float* b = bias ? bias + n : nullptr;
    auto piece = [&](auto number) {
      constexpr int FIRST = decltype(number)::value * PIECE;
      constexpr int ROWS = M - FIRST < PIECE ? M - FIRST : PIECE;
      if constexpr (ROWS > 0)
        tile<ROWS, S>(x + FIRST * K, w + n * K, run * K, K, b, y + FIRST * N + n, N, run);
    };
    each(piece, std::make_integer_sequence<int, PIECES>());
  };
  for (int64_t n = from; n < from + run; n++) tiles(std::integral_constant<int, R>(), n);
  for (int64_t n = from + run * R; n < to; n++) tiles(std::integral_constant<int, 1>(), n);
}

typedef void (*Outputs)(const float*, const float*, int64_t, const float*, float*, int64_t, int64_t,
                        int64_t);

template <int... M>
constexpr std::array<Outputs, sizeof...(M)> table(std::integer_sequence<int, M...>) {
  return {outputs<M + 1>...};
}
constexpr auto BY_ROWS = table(std::make_integer_sequence<int, WIDEST>());

bool plain(const at::Tensor& x) { return x.scalar_type() == at::kFloat; }

// y (.., N) of x (.., K), weight (N, K), bias (N,); torch's own for any other dtype or more rows.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  const int64_t N = weight.size(0), K = weight.size(1), M = x.numel() / K;
  const bool floats = plain(x) && plain(weight) && (!bias || plain(*bias));
  if (!floats || M > WIDEST || x.size(-1) != K || !weight.is_contiguous())
    return at::linear(x, weight, bias);
  at::Tensor rows = x.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = N;
  at::Tensor y = at::empty(shape, x.options());
  if (M == 0) return y;
  const float *from_x = rows.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  float* to_y = y.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(16, 32768 / K);  // 128 kB of weights pay for a thread
  at::parallel_for(0, N, grain, [&](int64_t from, int64_t to) {
    BY_ROWS[M - 1](from_x, w, K, b, to_y, N, from, to);
  });
  return y;
}

// ---------------------------------------------------------------- attend

constexpr int64_t QUERIES = 8;

// e^x for x <= 0, to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline Floats exp_of(Floats x) {
  Floats floor = Floats{} - 87.0f;
  Ints low = x < floor;
  x = low ? floor : x;
  Floats scaled = x * 1.44269504f - 0.5f;  // x <= 0: truncation rounds to the nearest
  Ints n = __builtin_convertvector(scaled, Ints);
  Floats whole = __builtin_convertvector(n, Floats);
  Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints power = (n + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return low ? Floats{} : p * scale;
}

template <int... I>
inline Floats pair_sums(Floats a, Floats b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
#else
  return __builtin_shuffle(a, b, Ints{(2 * I)...}) + __builtin_shuffle(a, b, Ints{(2 * I + 1)...});
#endif
}

// The sum of each of LANES vectors, in the lane of its number.
template <int COUNT = LANES>
inline Floats sums_of(const Floats* v) {
  if constexpr (COUNT == 1) {
    return v[0];
  } else {
    return pair_sums(sums_of<COUNT / 2>(v), sums_of<COUNT / 2>(v + COUNT / 2),
                     std::make_integer_sequence<int, LANES>());
  }
}

// scores (S) of one query with S keys (S, D).
inline void score_keys(const float* query, const float* keys, int64_t S, int64_t D, float* scores) {
  const int64_t whole = D - D % LANES;
  int64_t s = 0;
  for (; s + LANES <= S; s += LANES) {
    const float* block = keys + s * D;
    Floats sums[LANES] = {};
    for (int64_t d = 0; d < whole; d += LANES) {
      Floats part = load(query + d);
      for (int i = 0; i < LANES; i++) sums[i] += part * load(block + i * D + d);
    }
    Floats found = sums_of(sums);
    for (int64_t d = whole; d < D; d++)
      for (int i = 0; i < LANES; i++) found[i] += query[d] * block[i * D + d];
    store(scores + s, found);
  }
  for (; s < S; s++) {
    float found = 0;
    for (int64_t d = 0; d < D; d++) found += query[d] * keys[s * D + d];
    scores[s] = found;
  }
}

// out (Q rows, entries from, from + 1 .. of J vectors) of weights (Q, step) and values (S, E).
template <int Q, int J>
inline void mix(const float* weights, int64_t step, const float* values, int64_t S, int64_t E,
                float* const* out, const float* scale) {
  Floats sums[Q][J] = {};
  for (int64_t s = 0; s < S; s++)
    for (int j = 0; j < J; j++) {
      Floats value = load(values + s * E + j * LANES);
      for (int q = 0; q < Q; q++) sums[q][j] += weights[q * step + s] * value;
    }
  for (int q = 0; q < Q; q++)
    for (int j = 0; j < J; j++) store(out[q] + j * LANES, sums[q][j] * scale[q]);
}

template <int Q>
void mix_rows(const float* weights, int64_t step, const float* values, int64_t S, int64_t E,
              float* const* rows, const float* scale) {
  float* out[Q];
  for (int q = 0; q < Q; q++) out[q] = rows[q];
  int64_t e = 0;
  auto take = [&](auto vectors) {
    constexpr int J = decltype(vectors)::value;
    for (; e + J * LANES <= E; e += J * LANES) {
      mix<Q, J>(weights, step, values + e, S, E, out, scale);
      for (int q = 0; q < Q; q++) out[q] += J * LANES;
    }
  };
  take(std::integral_constant<int, 4>());
  take(std::integral_constant<int, 1>());
  for (; e < E; e++)
    for (int q = 0; q < Q; q++) {
      float found = 0;
      for (int64_t s = 0; s < S; s++) found += weights[q * step + s] * values[s * E + e];
      *out[q]++ = found * scale[q];
    }
}

// scores (S) times scale, plus hidden (S); returns the largest.
float masked(float* scores, const float* hidden, int64_t S, float scale, float softcap) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  if (softcap > 0) {
    for (int64_t s = 0; s < S; s++) scores[s] = softcap * std::tanh(scores[s] * scale / softcap);
    scale = 1;
  }
  Floats tops = Floats{} + NONE;
  int64_t s = 0;
  for (; s + LANES <= S; s += LANES) {
    Floats score = load(scores + s) * scale + load(hidden + s);
    store(scores + s, score);
    tops = score > tops ? score : tops;
  }
  float top = NONE;
  for (int i = 0; i < LANES; i++) top = std::max(top, tops[i]);
  for (; s < S; s++) top = std::max(top, scores[s] = scores[s] * scale + hidden[s]);
  return top;
}

// scores (S) become exp(score - top), 0 where hidden; returns their sum.
float soften(float* scores, int64_t S, float top) {
  Floats sums = {};
  int64_t s = 0;
  for (; s + LANES <= S; s += LANES) {
    Floats e = exp_of(load(scores + s) - top);
    store(scores + s, e);
    sums += e;
  }
  float total = sum<LANES>(sums);
  for (; s < S; s++) total += scores[s] = std::exp(scores[s] - top);
  return total;
}

// query (B, Hq, T, D), key (B, Hkv, T, D), value (B, Hkv, T, E) go to slots (B, T) of keys and
// values (B, Hkv, S, ..); mask (B, 1, T, V), 0 or -inf, over the first V slots. -> (B, T, Hq, E)
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  at::Tensor& keys, at::Tensor& values, const at::Tensor& slots,
                  const at::Tensor& mask, double scale, double softcap,
                  const std::optional<at::Tensor>& sinks) {
  const int64_t B = query.size(0), heads = query.size(1), T = query.size(2), D = query.size(3);
  const int64_t groups = heads / key.size(1), E = value.size(3), view = mask.size(3);
  const int64_t room = keys.size(2), kv_heads = key.size(1);
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && view <= room, "attend: slab");
  TORCH_CHECK(mask.stride(3) == 1 && mask.size(1) == 1, "attend: mask");
  at::Tensor q = query.stride(3) == 1 ? query : query.contiguous();
  at::Tensor k = key.stride(3) == 1 ? key : key.contiguous();
  at::Tensor v = value.stride(3) == 1 ? value : value.contiguous();
  at::Tensor place = slots.contiguous();
  const int64_t* slot = place.const_data_ptr<int64_t>();
  float *kept_k = keys.mutable_data_ptr<float>(), *kept_v = values.mutable_data_ptr<float>();
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < kv_heads; h++)
      for (int64_t t = 0; t < T; t++) {
        const int64_t to = (b * kv_heads + h) * room + slot[b * T + t];
        std::memcpy(kept_k + to * D,
                    k.const_data_ptr<float>() + b * k.stride(0) + h * k.stride(1) + t * k.stride(2),
                    D * sizeof(float));
        std::memcpy(kept_v + to * E,
                    v.const_data_ptr<float>() + b * v.stride(0) + h * v.stride(1) + t * v.stride(2),
                    E * sizeof(float));
      }
  at::Tensor out = at::empty({B, T, heads, E}, query.options());
  float* result = out.mutable_data_ptr<float>();
  const float* all_q = q.const_data_ptr<float>();
  const float* seen = mask.const_data_ptr<float>();
  const float* sink = sinks ? sinks->const_data_ptr<float>() : nullptr;
  // A unit of work: a few of the groups * T queries that share a row's kv head.
  const int64_t queries = groups * T, parts = (queries + QUERIES - 1) / QUERIES;
  const int64_t grain = 1 + 32768 / (QUERIES * view * (D + E) / LANES + 1);
  at::parallel_for(0, B * kv_heads * parts, grain, [&](int64_t from, int64_t to) {
    std::vector<float> scores(QUERIES * view);
    for (int64_t unit = from; unit < to; unit++) {
      const int64_t own = unit / parts, b = own / kv_heads, kv = own % kv_heads;
      const int64_t first = unit % parts * QUERIES, count = std::min(QUERIES, queries - first);
      const float *row_k = kept_k + own * room * D, *row_v = kept_v + own * room * E;
      int64_t end = 0;  // past the last slot that any of them sees
      for (int64_t i = first; i < first + count; i++) {
        const float* hidden = seen + b * mask.stride(0) + i % T * mask.stride(2);
        int64_t s = view;
        while (s > end && hidden[s - 1] != 0.0f) s--;
        end = s;
      }
      float* place_of[QUERIES];
      float scales[QUERIES];
      for (int64_t i = 0; i < count; i++) {
        const int64_t h = kv * groups + (first + i) / T, t = (first + i) % T;
        const float* hidden = seen + b * mask.stride(0) + t * mask.stride(2);
        float* score = scores.data() + i * view;
        score_keys(all_q + b * q.stride(0) + h * q.stride(1) + t * q.stride(2), row_k, end, D, score);
        float top = masked(score, hidden, end, scale, softcap);
        if (sink) top = std::max(top, sink[h]);
        float total = soften(score, end, top) + (sink ? std::exp(sink[h] - top) : 0.0f);
        scales[i] = 1.0f / total;
        place_of[i] = result + ((b * T + t) * heads + h) * E;
      }
      int64_t i = 0;
      auto rows = [&](auto several) {
        constexpr int Q = decltype(several)::value;
        for (; i + Q <= count; i += Q)
          mix_rows<Q>(scores.data() + i * view, view, row_v, end, E, place_of + i, scales + i);
      };
      rows(std::integral_constant<int, 4>());
      rows(std::integral_constant<int, 3>());
      rows(std::integral_constant<int, 1>());
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(draftsmith, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor slots, Tensor mask, float scale, float softcap, Tensor? sinks) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) {
  library.impl("linear", linear);
  library.impl("attend", attend);
}
