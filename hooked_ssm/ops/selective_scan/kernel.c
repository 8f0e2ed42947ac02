/* Selective scan on the CPU: forward and backward of README.md, float32, contiguous tensors.
 *
 * Layouts: x, dt, y [batch][pos][channel]; A [channel][n]; B, C [batch][pos][group][n];
 * states of any kind [batch][slot][channel][n]. A work item is one document and one block of
 * BLOCK channels, so results do not depend on how many threads share the items.
 * The forward keeps the state before every CHUNK tokens; the backward recomputes within a chunk.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64
#define CHUNK 32

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t batch, length, channels, groups, n;
    const float *x, *dt, *A, *B, *C, *initial; /* initial may be NULL */
    const int64_t *slot;                       /* per position: where its state is kept, or -1 */
    int64_t slots;
    float *checkpoints, *final;
} Scan;

int64_t selective_scan_block(void) { return BLOCK; }
int64_t selective_scan_chunk(void) { return CHUNK; }

/* exp for x <= 0 or moderately positive: 2^k * exp(r), |r| <= ln2/2; about 1 ulp, no branches. */
INLINE float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float k = __builtin_floorf(x * 1.44269504088896341f + 0.5f);
    float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } scale;
    scale.i = ((int32_t)k + 127) << 23;
    return p * scale.f;
}

/* Offsets of a document's channel e at position t. */
INLINE size_t at(const Scan *s, int64_t b, int64_t t, int64_t e) {
    return ((size_t)b * s->length + t) * s->channels + e;
}
INLINE size_t shared_at(const Scan *s, int64_t b, int64_t t, int64_t e) {
    return (((size_t)b * s->length + t) * s->groups + e / (s->channels / s->groups)) * s->n;
}
INLINE size_t state_at(const Scan *s, int64_t row, int64_t rows, int64_t b, int64_t e) {
    return (((size_t)b * rows + row) * s->channels + e) * s->n;
}

INLINE float step(float *h, const float *before, float *decay, const float *A, const float *B,
                  const float *C, float dt, float dtx, int64_t n) {
    float y = 0.0f;
#pragma omp simd reduction(+ : y)
    for (int64_t j = 0; j < n; ++j) {
        float a = fast_exp(dt * A[j]);
        float value = a * before[j] + dtx * B[j];
        if (decay) decay[j] = a;
        h[j] = value;
        y += value * C[j];
    }
    return y;
}

INLINE void forward_item(const Scan *s, int64_t b, int64_t e0, int64_t e1, float *y,
                         float *states, const int64_t n) {
    const int64_t chunks = (s->length + CHUNK - 1) / CHUNK;
    const size_t width = (size_t)(e1 - e0) * n;
    float *h = s->final + state_at(s, 0, 1, b, e0);
    if (s->initial) memcpy(h, s->initial + state_at(s, 0, 1, b, e0), width * sizeof(float));
    else memset(h, 0, width * sizeof(float));
    for (int64_t t = 0; t < s->length; ++t) {
        if (s->checkpoints && t % CHUNK == 0)
            memcpy(s->checkpoints + state_at(s, t / CHUNK, chunks, b, e0), h, width * sizeof(float));
        for (int64_t e = e0; e < e1; ++e) {
            size_t i = at(s, b, t, e), k = shared_at(s, b, t, e);
            float *row = h + (e - e0) * n;
            y[i] = step(row, row, NULL, s->A + e * n, s->B + k, s->C + k, s->dt[i],
                        s->dt[i] * s->x[i], n);
        }
        if (states && s->slot[t] >= 0)
            memcpy(states + state_at(s, s->slot[t], s->slots, b, e0), h, width * sizeof(float));
    }
}

typedef struct {
    const float *y, *states, *final;   /* incoming; states and final may be NULL */
    float *x, *dt, *A, *B, *C, *initial; /* A [batch]...; B, C [blocks][batch]...: partial sums */
} Grads;

/* One token of one channel: see README.md for the names. Returns through gx, gdt. */
INLINE void back_step(float *gh, const float *h, const float *before, const float *decay,
                      const float *A, const float *B, const float *C, float *gA, float *gB,
                      float *gC, float dt, float x, float gy, float *gx, float *gdt, int64_t n) {
    float through_value = 0.0f, through_decay = 0.0f;
#pragma omp simd reduction(+ : through_value, through_decay)
    for (int64_t j = 0; j < n; ++j) {
        float g = gh[j] + gy * C[j];
        float into_decay = g * before[j] * decay[j];
        gC[j] += gy * h[j];
        gB[j] += g * dt * x;
        gA[j] += into_decay * dt;
        through_value += g * B[j];
        through_decay += into_decay * A[j];
        gh[j] = g * decay[j];
    }
    *gx = through_value * dt;
    *gdt = through_value * x + through_decay;
}

INLINE void backward_item(const Scan *s, const Grads *g, int64_t block, int64_t b, int64_t e0,
                          int64_t e1, float *scratch, const int64_t n) {
    const int64_t chunks = (s->length + CHUNK - 1) / CHUNK;
    const size_t width = (size_t)(e1 - e0) * n;
    float *h = scratch, *decay = scratch + (CHUNK + 1) * width; /* h[0] is before the chunk */
    const size_t per_block = (size_t)s->batch * s->length * s->groups * s->n;
    float *gB = g->B + block * per_block, *gC = g->C + block * per_block;
    float *gh = g->initial + state_at(s, 0, 1, b, e0);
    if (g->final) memcpy(gh, g->final + state_at(s, 0, 1, b, e0), width * sizeof(float));
    else memset(gh, 0, width * sizeof(float));
    for (int64_t c = chunks - 1; c >= 0; --c) {
        int64_t first = c * CHUNK, stop = first + CHUNK < s->length ? first + CHUNK : s->length;
        memcpy(h, s->checkpoints + state_at(s, c, chunks, b, e0), width * sizeof(float));
        for (int64_t t = first; t < stop; ++t)
            for (int64_t e = e0; e < e1; ++e) {
                size_t i = at(s, b, t, e), k = shared_at(s, b, t, e), o = (e - e0) * n;
                float *before = h + (t - first) * width + o;
                step(before + width, before, decay + (t - first) * width + o, s->A + e * n,
                     s->B + k, s->C + k, s->dt[i], s->dt[i] * s->x[i], n);
            }
        for (int64_t t = stop - 1; t >= first; --t) {
            if (g->states && s->slot[t] >= 0) {
                const float *extra = g->states + state_at(s, s->slot[t], s->slots, b, e0);
                for (size_t j = 0; j < width; ++j) gh[j] += extra[j];
            }
            for (int64_t e = e0; e < e1; ++e) {
                size_t i = at(s, b, t, e), k = shared_at(s, b, t, e), o = (e - e0) * n;
                const float *before = h + (t - first) * width + o;
                back_step(gh + o, before + width, before, decay + (t - first) * width + o,
                          s->A + e * n, s->B + k, s->C + k, g->A + ((size_t)b * s->channels + e) * n,
                          gB + k, gC + k, s->dt[i], s->x[i], g->y[i], g->x + i, g->dt + i, n);
            }
        }
    }
}

#define BOUNDS(item)                                                 \
    int64_t blocks = (s->channels + BLOCK - 1) / BLOCK;              \
    int64_t b = (item) / blocks, block = (item) % blocks;            \
    int64_t e0 = block * BLOCK;                                      \
    int64_t e1 = e0 + BLOCK < s->channels ? e0 + BLOCK : s->channels

/* Items [first, stop); each is a document and a block of channels. states may be NULL. */
CLONES void selective_scan_forward(const Scan *s, float *y, float *states, int64_t first,
                                   int64_t stop) {
    for (int64_t item = first; item < stop; ++item) {
        BOUNDS(item);
        if (s->n == 16) forward_item(s, b, e0, e1, y, states, 16);
        else forward_item(s, b, e0, e1, y, states, s->n);
    }
}

/* Returns 0, or 1 when there is no memory for the states of a chunk. */
CLONES int selective_scan_backward(const Scan *s, const Grads *g, int64_t first, int64_t stop) {
    size_t width = (size_t)BLOCK * s->n;
    float *scratch = malloc((2 * CHUNK + 1) * width * sizeof(float));
    if (!scratch) return 1;
    for (int64_t item = first; item < stop; ++item) {
        BOUNDS(item);
        if (s->n == 16) backward_item(s, g, block, b, e0, e1, scratch, 16);
        else backward_item(s, g, block, b, e0, e1, scratch, s->n);
    }
    free(scratch);
    return 0;
}
