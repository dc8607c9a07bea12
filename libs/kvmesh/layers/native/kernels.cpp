// CPU kernels of a Llama decoder layer: bf16 weights and KV, fp32 activations and accumulation.
//
// Written with the compiler's vector extensions, so one source serves AVX-512, AVX2 and NEON. Why they exist: on CPUs
// without bf16 arithmetic a library product of bf16 matrices first widens the weights, which costs more than the product
// itself at decode batch sizes. Here each weight is widened in registers, once per block of up to MR rows.
//
// A weight matrix (n, k) is stored in panels of 32 rows: panel[k] is 16 words of 32 bits; word i holds row i in its low
// and row 16 + i in its high half. So one load gives two vectors with a shift and a mask.
//
// Every entry point runs one OpenMP region; threads split panels (products), rows (norms) or (sequence, head) pairs.

#include <cstdint>
#include <cstring>

#include <omp.h>

namespace {

typedef float f16 __attribute__((vector_size(64)));
typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef uint32_t u16x __attribute__((vector_size(64)));
typedef int32_t i16x __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

constexpr int LANES = 16;
constexpr int PANEL = 32;
constexpr int PREFETCH = 64;     // panel rows fetched ahead: 4 KiB, past the page's end where the hardware stops
constexpr int MR = 12;           // rows per register block: 24 accumulators of 32 vector registers
constexpr int GROUP = 4;          // query heads that share one pass over K and V
constexpr int ROWS_CACHED = 96;  // rows whose fp32 inputs stay in the L2 cache while all panels pass

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
inline void store(float* p, f16 v) { std::memcpy(p, &v, sizeof(v)); }
inline f16 splat(float x) { return f16{} + x; }
inline f16 as_float(u16x v) { return (f16)v; }
inline f16 widen(const uint16_t* p) { return as_float(__builtin_convertvector(load<h16>(p), u16x) << 16); }
inline uint16_t to_bf16(float x) {  // round to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float sum(f16 v) {  // a tree of halves: a chain of 16 additions would cost more than the dot product it ends
  f8 half[2];
  std::memcpy(half, &v, sizeof(v));
  half[0] += half[1];
  f4 quarter[2];
  std::memcpy(quarter, half, sizeof(half[0]));
  quarter[0] += quarter[1];
  return (quarter[0][0] + quarter[0][1]) + (quarter[0][2] + quarter[0][3]);
}
inline f16 pick(i16x mask, f16 a, f16 b) { return (f16)(((i16x)a & mask) | ((i16x)b & ~mask)); }

// exp by 2^n * p(r), |r| <= ln2 / 2; relative error below 2e-7 on [-87, 88], clamped outside.
inline f16 exp_v(f16 x) {
  x = pick(x < splat(-87.0f), splat(-87.0f), x);
  x = pick(x > splat(88.0f), splat(88.0f), x);
  f16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  f16 n = (x * 1.44269504f + magic) - magic;
  f16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i16x e = (__builtin_convertvector(n, i16x) + 127) << 23;
  return p * (f16)e;
}

}  // namespace

extern "C" {

struct Linear {
  const uint32_t* panels;
  const float* bias;  // (n,) or null
  int64_t n, k;
};

struct Model {
  int64_t hidden, heads, kv_heads, dim, page_size;
  float eps;
};

struct Layer {
  const float *attn_norm, *mlp_norm;
  Linear qkv, out, gate_up, down;  // gate_up's panels pair 16 gate rows (low) with 16 up rows (high)
  uint16_t* kv;                    // (num_pages, kv_heads, 2, page_size, dim)
};

struct Step {
  int64_t rows, decode_rows, table_width;
  float *x, *qkv, *attn, *act;  // (rows, hidden | (heads + 2 kv_heads) dim | heads dim | intermediate)
  float* packed;                // (rows, max k): inputs of the current product
  float* scores;                // (threads, GROUP, score_stride)
  int64_t score_stride;
  const float* cos_sin;  // (rows, dim): cosines, then sines
  const int64_t *pages, *offsets;
  const int32_t *tables, *lengths;  // (decode_rows, table_width), (decode_rows,)
  int32_t threads;
};
}

namespace {

enum class Out { store, add, swiglu };

struct Blocks {  // rows cut into equal blocks of at most MR
  int64_t rows, count;
  explicit Blocks(int64_t rows_) : rows(rows_), count((rows_ + MR - 1) / MR) {}
  int64_t begin(int64_t b) const { return rows * b / count; }
};

// Inputs of a product, per block as [k][rows of the block], with RMSNorm if `weight` is given.
void pack(const float* x, int64_t rows, int64_t k, const float* weight, float eps, float* packed) {
  for (int64_t c0 = 0; c0 < rows; c0 += ROWS_CACHED) {
    Blocks blocks(rows - c0 < ROWS_CACHED ? rows - c0 : ROWS_CACHED);
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks.count; b++) {
      int64_t r0 = blocks.begin(b), mr = blocks.begin(b + 1) - r0;
      float* out = packed + (c0 + r0) * k;
      for (int64_t m = 0; m < mr; m++) {
        const float* in = x + (c0 + r0 + m) * k;
        float scale = 1.0f;
        if (weight) {
          f16 total = {};
          int64_t i = 0;
          for (; i + LANES <= k; i += LANES) {
            f16 v = load<f16>(in + i);
            total += v * v;
          }
          float squares = sum(total);
          for (; i < k; i++) squares += in[i] * in[i];
          scale = 1.0f / __builtin_sqrtf(squares / (float)k + eps);
        }
        if (weight)
          for (int64_t i = 0; i < k; i++) out[i * mr + m] = in[i] * scale * weight[i];
        else
          for (int64_t i = 0; i < k; i++) out[i * mr + m] = in[i];
      }
    }
  }
#pragma omp barrier
}

template <int M, Out OUT>
void block(const uint32_t* panel, const float* x, int64_t k, const float* bias, int64_t n0, int64_t n, float* y,
           int64_t stride) {
  constexpr int UNROLL = M <= 2 ? 4 : 1;  // few accumulators: more chains to hide the latency
  f16 lo[UNROLL][M] = {}, hi[UNROLL][M] = {};
  const u16x mask = u16x{} + 0xffff0000u;
  int64_t i = 0;
  for (; i + UNROLL <= k; i += UNROLL)
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; u++) {
      u16x w = load<u16x>(panel + (i + u) * LANES);
      __builtin_prefetch(panel + (i + u + PREFETCH) * LANES);
      f16 w0 = as_float(w << 16), w1 = as_float(w & mask);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        float s = x[(i + u) * M + m];
        lo[u][m] += w0 * s;
        hi[u][m] += w1 * s;
      }
    }
  for (; i < k; i++) {
    u16x w = load<u16x>(panel + i * LANES);
    f16 w0 = as_float(w << 16), w1 = as_float(w & mask);
    for (int m = 0; m < M; m++) {
      lo[0][m] += w0 * x[i * M + m];
      hi[0][m] += w1 * x[i * M + m];
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) {
    f16 a = lo[0][m], b = hi[0][m];
    for (int u = 1; u < UNROLL; u++) a += lo[u][m], b += hi[u][m];
    float both[PANEL];
    store(both, a);
    store(both + LANES, b);
    if (OUT == Out::swiglu) {  // n counts gate rows; the bias is gate's, then up's
      float* out = y + m * stride + n0 / 2;
      int64_t count = n - n0 / 2 < LANES ? n - n0 / 2 : LANES;
      if (bias) {
        for (int64_t j = 0; j < count; j++) both[j] += bias[n0 / 2 + j], both[LANES + j] += bias[n + n0 / 2 + j];
        a = load<f16>(both), b = load<f16>(both + LANES);
      }
      f16 v = a / (1.0f + exp_v(-a)) * b;
      if (count == LANES)
        store(out, v);
      else
        for (int64_t j = 0; j < count; j++) out[j] = v[j];
      continue;
    }
    float* out = y + m * stride + n0;
    int64_t count = n - n0 < PANEL ? n - n0 : PANEL;
    if (bias)
      for (int64_t j = 0; j < count; j++) both[j] += bias[n0 + j];
    if (OUT == Out::add)
      for (int64_t j = 0; j < count; j++) out[j] += both[j];
    else
      std::memcpy(out, both, count * sizeof(float));
  }
}

template <Out OUT, int M = MR>
void dispatch(int64_t mr, const uint32_t* panel, const float* x, int64_t k, const float* bias, int64_t n0, int64_t n,
              float* y, int64_t stride) {
  if constexpr (M > 0) {
    if (mr == M)
      block<M, OUT>(panel, x, k, bias, n0, n, y, stride);
    else
      dispatch<OUT, M - 1>(mr, panel, x, k, bias, n0, n, y, stride);
  }
}

// y (rows, n) = / += packed W^T; swiglu: y (rows, n / 2).
template <Out OUT>
void product(const Linear& w, const float* packed, int64_t rows, float* y) {
  const int64_t n = OUT == Out::swiglu ? w.n / 2 : w.n;
  const int64_t panels = OUT == Out::swiglu ? (n + LANES - 1) / LANES : (n + PANEL - 1) / PANEL;
  for (int64_t c0 = 0; c0 < rows; c0 += ROWS_CACHED) {
    Blocks blocks(rows - c0 < ROWS_CACHED ? rows - c0 : ROWS_CACHED);
#pragma omp for schedule(dynamic, 3) nowait
    for (int64_t p = 0; p < panels; p++)
      for (int64_t b = 0; b < blocks.count; b++) {
        int64_t r0 = c0 + blocks.begin(b), mr = blocks.begin(b + 1) - blocks.begin(b);
        dispatch<OUT>(mr, w.panels + p * w.k * LANES, packed + r0 * w.k, w.k, w.bias, p * PANEL, n, y + r0 * n, n);
      }
  }
#pragma omp barrier
}

// Rotate q and k in place (half-split pairs), write k and v of each row to its page, scale nothing.
void rotate_and_append(const Model& m, const Layer& layer, const Step& s) {
  const int64_t half = m.dim / 2, width = (m.heads + 2 * m.kv_heads) * m.dim;
#pragma omp for schedule(static)
  for (int64_t r = 0; r < s.rows; r++) {
    const float *cos = s.cos_sin + r * m.dim, *sin = cos + half;
    for (int64_t h = 0; h < m.heads + m.kv_heads; h++) {
      float* v = s.qkv + r * width + h * m.dim;
      for (int64_t i = 0; i < half; i++) {
        float a = v[i], b = v[half + i];
        v[i] = a * cos[i] - b * sin[i];
        v[half + i] = b * cos[i] + a * sin[i];
      }
    }
    const float* k = s.qkv + r * width + m.heads * m.dim;
    for (int64_t h = 0; h < m.kv_heads; h++) {
      uint16_t* page = layer.kv + ((s.pages[r] * m.kv_heads + h) * 2 * m.page_size + s.offsets[r]) * m.dim;
      for (int64_t i = 0; i < m.dim; i++) {
        page[i] = to_bf16(k[h * m.dim + i]);
        page[m.page_size * m.dim + i] = to_bf16(k[(m.kv_heads + h) * m.dim + i]);
      }
    }
  }
}

// G query heads that share a KV head, against the pages of one sequence. D: head_dim / 16. q and out are (G, head_dim),
// scores is scratch of G rows.
template <int D, int G>
void attend(const uint16_t* kv, const int32_t* table, int64_t length, int64_t page_size, int64_t page_stride,
            const float* q, float* scores, int64_t score_stride, float* out) {
  const float scale = 1.0f / __builtin_sqrtf((float)(D * LANES));
  f16 query[G][D];
  float peak[G], inverse[G];
  for (int g = 0; g < G; g++) {
    peak[g] = -3.0e38f;
    for (int d = 0; d < D; d++) query[g][d] = load<f16>(q + (g * D + d) * LANES) * scale;
  }
  for (int64_t t0 = 0; t0 < length; t0 += page_size) {
    const uint16_t* k = kv + table[t0 / page_size] * page_stride;
    int64_t count = length - t0 < page_size ? length - t0 : page_size;
    for (int64_t t = 0; t < count; t++) {
      f16 dot[G] = {};
#pragma GCC unroll 8
      for (int d = 0; d < D; d++) {
        f16 key = widen(k + (t * D + d) * LANES);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) dot[g] += query[g][d] * key;
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        float score = sum(dot[g]);
        scores[g * score_stride + t0 + t] = score;
        peak[g] = score > peak[g] ? score : peak[g];
      }
    }
  }
  int64_t rounded = (length + LANES - 1) / LANES * LANES;
  for (int g = 0; g < G; g++) {
    float* row = scores + g * score_stride;
    f16 total = {};
    for (int64_t t = length; t < rounded; t++) row[t] = -1.0e30f;
    for (int64_t t = 0; t < rounded; t += LANES) {
      f16 s = load<f16>(row + t);
      f16 e = pick(s < splat(-1.0e29f), splat(0.0f), exp_v(s - peak[g]));
      total += e;
      store(row + t, e);
    }
    inverse[g] = 1.0f / sum(total);
  }
  f16 acc[G][D] = {};
  for (int64_t t0 = 0; t0 < length; t0 += page_size) {
    const uint16_t* v = kv + table[t0 / page_size] * page_stride + page_size * D * LANES;
    int64_t count = length - t0 < page_size ? length - t0 : page_size;
    for (int64_t t = 0; t < count; t++)
#pragma GCC unroll 8
      for (int d = 0; d < D; d++) {
        f16 value = widen(v + (t * D + d) * LANES);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) acc[g][d] += value * scores[g * score_stride + t0 + t];
      }
  }
  for (int g = 0; g < G; g++)
    for (int d = 0; d < D; d++) store(out + (g * D + d) * LANES, acc[g][d] * inverse[g]);
}

// All `group` query heads of a KV head, at most GROUP at a time.
template <int D>
void attend_group(int64_t group, const uint16_t* kv, const int32_t* table, int64_t length, int64_t page_size,
                  int64_t page_stride, const float* q, float* scores, int64_t score_stride, float* out) {
  for (int64_t g = 0; g < group; g += GROUP) {
    const float* qg = q + g * D * LANES;
    float* og = out + g * D * LANES;
    switch (group - g < GROUP ? group - g : GROUP) {
      case 1: attend<D, 1>(kv, table, length, page_size, page_stride, qg, scores, score_stride, og); break;
      case 2: attend<D, 2>(kv, table, length, page_size, page_stride, qg, scores, score_stride, og); break;
      case 3: attend<D, 3>(kv, table, length, page_size, page_stride, qg, scores, score_stride, og); break;
      case 4: attend<D, 4>(kv, table, length, page_size, page_stride, qg, scores, score_stride, og); break;
    }
  }
}

void decode_attention(const Model& m, const Layer& layer, const Step& s) {
  const int64_t group = m.heads / m.kv_heads, width = (m.heads + 2 * m.kv_heads) * m.dim;
  const int64_t head_stride = 2 * m.page_size * m.dim, page_stride = m.kv_heads * head_stride;
  const int64_t stride = s.score_stride;
  float* scores = s.scores + omp_get_thread_num() * GROUP * stride;
#pragma omp for schedule(dynamic, 1)
  for (int64_t task = 0; task < s.decode_rows * m.kv_heads; task++) {
    int64_t r = task / m.kv_heads, h = task % m.kv_heads;
    const uint16_t* kv = layer.kv + h * head_stride;
    const int32_t* table = s.tables + r * s.table_width;
    const float* q = s.qkv + r * width + h * group * m.dim;
    float* out = s.attn + (r * m.heads + h * group) * m.dim;
    int64_t length = s.lengths[r], size = m.page_size;
    switch (m.dim / LANES) {
      case 1: attend_group<1>(group, kv, table, length, size, page_stride, q, scores, stride, out); break;
      case 2: attend_group<2>(group, kv, table, length, size, page_stride, q, scores, stride, out); break;
      case 4: attend_group<4>(group, kv, table, length, size, page_stride, q, scores, stride, out); break;
      case 6: attend_group<6>(group, kv, table, length, size, page_stride, q, scores, stride, out); break;
      case 8: attend_group<8>(group, kv, table, length, size, page_stride, q, scores, stride, out); break;
    }
  }
}

}  // namespace

extern "C" {

// First half of a layer: norm, qkv, rotary, KV into its pages, attention of the decode rows.
void kvmesh_attention_in(const Model* m, const Layer* layer, const Step* s) {
#pragma omp parallel num_threads(s->threads)
  {
    pack(s->x, s->rows, m->hidden, layer->attn_norm, m->eps, s->packed);
    product<Out::store>(layer->qkv, s->packed, s->rows, s->qkv);
    rotate_and_append(*m, *layer, *s);
    decode_attention(*m, *layer, *s);
  }
}

// Second half: output projection and residual, norm, SwiGLU, down projection and residual.
void kvmesh_attention_out(const Model* m, const Layer* layer, const Step* s) {
#pragma omp parallel num_threads(s->threads)
  {
    pack(s->attn, s->rows, m->heads * m->dim, nullptr, 0.0f, s->packed);
    product<Out::add>(layer->out, s->packed, s->rows, s->x);
    pack(s->x, s->rows, m->hidden, layer->mlp_norm, m->eps, s->packed);
    product<Out::swiglu>(layer->gate_up, s->packed, s->rows, s->act);
    pack(s->act, s->rows, layer->down.k, nullptr, 0.0f, s->packed);
    product<Out::add>(layer->down, s->packed, s->rows, s->x);
  }
}

// The second half for one of several ranks: each of the two residual sums is over ranks, so this rank's share of it is
// written to `share` (rows, hidden), and whoever has added all shares to x goes on.
void kvmesh_attention_share(const Model* m, const Layer* layer, const Step* s, float* share) {
#pragma omp parallel num_threads(s->threads)
  {
    pack(s->attn, s->rows, m->heads * m->dim, nullptr, 0.0f, s->packed);
    product<Out::store>(layer->out, s->packed, s->rows, share);
  }
}

void kvmesh_mlp_share(const Model* m, const Layer* layer, const Step* s, float* share) {
#pragma omp parallel num_threads(s->threads)
  {
    pack(s->x, s->rows, m->hidden, layer->mlp_norm, m->eps, s->packed);
    product<Out::swiglu>(layer->gate_up, s->packed, s->rows, s->act);
    pack(s->act, s->rows, layer->down.k, nullptr, 0.0f, s->packed);
    product<Out::store>(layer->down, s->packed, s->rows, share);
  }
}

// y (rows, n) = x (rows, k) W^T in fp32; packed is scratch of (rows, k).
void kvmesh_linear(const Linear* w, const float* x, int64_t rows, float* packed, float* y, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    pack(x, rows, w->k, nullptr, 0.0f, packed);
    product<Out::store>(*w, packed, rows, y);
  }
}
}
