/* A block of a narrow CNN, [2×2 max pooling] → convolution → [GroupNorm → ReLU], forward and backward; or a
   convolution that is added to its input, x + alpha · (W ∗ x + b).

   Tensors are float32 and channels_last. One sample at a time is turned into planes, one per channel, which
   stay in the cache through all layers of the block. Planes to be convolved are padded: `pad` zero rows above
   and below, and `pad` zero columns between one row and the next. So a tap of the kernel is the same plane at
   an offset, and vectors run on over the end of a row; what they compute there is dropped. One thread; every
   sum has one order. */

#include <math.h>

#include "conv_layout.h"

/* --- convolution ----------------------------------------------------------------------------------- */

/* Weights in the order of use, [outs / BLOCK, ins, taps, BLOCK]; `turned` for the gradient of the input. What
   is added to its input is one convolution too: its kernel lets the input pass. */
static void pack(const Shape *s, const Room *r, const float *weight, const float *alpha, int turned) {
    long ins = turned ? s->outs : s->ins, outs = turned ? s->ins : s->outs;
    float *packed = r->packed;
    for (long first = 0; first < outs; first += BLOCK)
        for (long i = 0; i < ins; i++)
            for (long t = 0; t < r->taps; t++)
                for (long o = first; o < first + BLOCK; o++) {
                    long place = turned ? ((i + 1) * r->taps - 1 - t) * s->ins + o : (o * r->taps + t) * s->ins + i;
                    float value = o < outs ? weight[place] : 0.0f;
                    *packed++ = alpha ? *alpha * value + (o == i && t == r->taps / 2) : value;
                }
}

INLINE void convolve_tile(const Room *r, const float *in, long ins, const float *weight, const float *bias,
                          float *out, const int n) {
    vec sum[BLOCK][VECTORS], x[VECTORS];
    for (int o = 0; o < BLOCK; o++)
        for (int v = 0; v < n; v++) sum[o][v] = bias[o] - (vec){};
    for (long i = 0; i < ins; i++, in += r->plane)
        for (long t = 0; t < r->taps; t++, weight += BLOCK) {
            for (int v = 0; v < n; v++) x[v] = load(in + r->offset[t] + v * LANES);
            for (int o = 0; o < BLOCK; o++) {
                vec one = weight[o] - (vec){};
                for (int v = 0; v < n; v++) sum[o][v] += one * x[v];
            }
        }
    for (int o = 0; o < BLOCK; o++)
        for (int v = 0; v < n; v++) store(out + o * r->plane + v * LANES, sum[o][v]);
}

/* From padded planes to planes whose rows are as far apart. */
static void convolve(Room *r, const float *in, long ins, const float *weight, const float *bias, long outs,
                     float *out) {
    for (long o = 0; o < outs; o += BLOCK, weight += ins * r->taps * BLOCK) {
        float *to = out + o * r->plane;
        long p = 0;
        for (; p + (VECTORS - 1) * LANES < r->length; p += VECTORS * LANES) {
            fetch(r, LINES);
            convolve_tile(r, in + p, ins, weight, bias + o, to + p, VECTORS);
        }
        for (; p < r->length; p += LANES) convolve_tile(r, in + p, ins, weight, bias + o, to + p, 1);
    }
}

INLINE void correlate_tile(const Room *r, const float *x, long next_x, const float *g, long next_g, long samples,
                           long tap, vec *sums, const int n) {
    vec sum[TAPS][BLOCK], v[TAPS];
    for (int t = 0; t < n; t++)
        for (int o = 0; o < BLOCK; o++) sum[t][o] = sums[t * BLOCK + o];
    for (long s = 0; s < samples; s++, x += next_x, g += next_g)
        for (long p = 0; p < r->length; p += LANES) {
            for (int t = 0; t < n; t++) v[t] = load(x + r->offset[tap + t] + p);
            for (int o = 0; o < BLOCK; o++) {
                vec one = load(g + r->first + o * r->plane + p);
                for (int t = 0; t < n; t++) sum[t][o] += one * v[t];
            }
        }
    for (int t = 0; t < n; t++)
        for (int o = 0; o < BLOCK; o++) sums[t * BLOCK + o] = sum[t][o];
}

/* Adds what some samples say about the weights to `sums`, [outs / BLOCK, ins, taps, BLOCK, LANES]. */
static void correlate(const Shape *s, Room *r, long samples) {
    long next_x = up(s->ins, BLOCK) * r->plane, next_g = up(s->outs, BLOCK) * r->plane;
    vec *sums = (vec *)r->sums;
    for (long o = 0; o < s->outs; o += BLOCK)
        for (long i = 0; i < s->ins; i++, sums += r->taps * BLOCK) {
            const float *x = r->x + i * r->plane, *g = r->g + o * r->plane;
            long t = 0;
            fetch(r, LINES);
            for (; t + TAPS <= r->taps; t += TAPS)
                correlate_tile(r, x, next_x, g, next_g, samples, t, sums + t * BLOCK, TAPS);
            for (; t < r->taps; t++) correlate_tile(r, x, next_x, g, next_g, samples, t, sums + t * BLOCK, 1);
        }
}

static void sum_lanes(const Shape *s, const Room *r, float factor, float *weight_grad) {
    for (long o = 0; o < s->outs; o++)
        for (long t = 0; t < r->taps; t++)
            for (long i = 0; i < s->ins; i++) {
                vec lanes = ((vec *)r->sums)[((o / BLOCK * s->ins + i) * r->taps + t) * BLOCK + o % BLOCK];
                float sum = 0.0f;
                for (int l = 0; l < LANES; l++) sum += lanes[l];
                *weight_grad++ = factor * sum;
            }
}

/* --- normalisation and ReLU of one group ------------------------------------------------------------ */

static float sum_of(const float *x, long size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < size; i++) sum += x[i];
    return sum;
}

static void normalise(const float *y, long channels, long area, const float *gamma, const float *beta, float eps,
                      float *statistics, float *out) {
    long size = channels * area;
    float mean = sum_of(y, size) / size, squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < size; i++) squares += (y[i] - mean) * (y[i] - mean);
    float rstd = 1.0f / sqrtf(squares / size + eps);
    statistics[0] = mean, statistics[1] = rstd;
    for (long c = 0; c < channels; c++, y += area, out += area) {
        float scale = rstd * gamma[c], shift = beta[c] - mean * scale;
        for (long i = 0; i < area; i++) {
            float z = y[i] * scale + shift;
            out[i] = z < 0.0f ? 0.0f : z; /* NaN stays */
        }
    }
}

/* In place: from the gradient of the output to that of `y`. */
static void normalise_backward(const float *y, long channels, long area, const float *gamma, const float *beta,
                               const float *statistics, float *grad, float *gamma_grad, float *beta_grad) {
    long size = channels * area;
    float mean = statistics[0], rstd = statistics[1], total = 0.0f, along = 0.0f;
    for (long c = 0; c < channels; c++) {
        const float *from = y + c * area;
        float *to = grad + c * area, scale = rstd * gamma[c], shift = beta[c] - mean * scale, sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
        for (long i = 0; i < area; i++) {
            to[i] = from[i] * scale + shift <= 0.0f ? 0.0f : to[i];
            sum += to[i];
            dot += to[i] * (from[i] - mean);
        }
        gamma_grad[c] += dot * rstd;
        beta_grad[c] += sum;
        total += gamma[c] * sum;
        along += gamma[c] * dot * rstd;
    }
    float slope = -rstd * rstd * along / size, level = -rstd * total / size - slope * mean;
    for (long c = 0; c < channels; c++, y += area, grad += area)
        for (long i = 0; i < area; i++) grad[i] = rstd * gamma[c] * grad[i] + slope * y[i] + level;
}

/* --- the block --------------------------------------------------------------------------------------- */

/* Between a tensor and padded planes: at once where no vector runs over the end of a row, else by dense ones. */
static void split_padded(const Shape *s, const Room *r, const float *x, long channels, float *padded) {
    if (s->width % LANES == 0) {
        split(x, channels, s->height, s->width, padded + r->first, r->stride, r->plane);
        return;
    }
    split(x, channels, 1, r->area, r->dense, 0, r->area);
    copy_rows(r->dense, r->area, s->width, padded + r->first, r->plane, r->stride, channels, s);
}

static void join_flat(const Shape *s, const Room *r, long channels, float *x) {
    if (s->width % LANES == 0) {
        join(r->flat, r->stride, r->plane, channels, s->height, s->width, x);
        return;
    }
    copy_rows(r->flat, r->plane, r->stride, r->dense, r->area, s->width, channels, s);
    join(r->dense, 0, r->area, channels, 1, r->area, x);
}

/* One sample's input into padded planes; before pooling it stays in `wide`. */
static void read_input(const Shape *s, const Room *r, const float *x, float *padded) {
    if (!s->pools) {
        split_padded(s, r, x, s->ins, padded);
        return;
    }
    split(x, s->ins, 1, r->in_area, r->wide, 0, r->in_area);
    pool(r->wide, s->ins * s->height, s->width, r->dense);
    copy_rows(r->dense, r->area, s->width, padded + r->first, r->plane, r->stride, s->ins, s);
}

/* `kept` (the convolution's output as planes) and `statistics` are for `backward`; `kept` may be NULL. */
int conv_block_forward(const Shape *s, const float *x, const float *weight, const float *bias, const float *alpha,
                       const float *gamma, const float *beta, float *out, float *kept, float *statistics) {
    Room r = {0};
    if (!make_room(s, &r, 0)) return 1;
    long x_size = s->ins * r.in_area, size = s->outs * r.area, each = s->groups ? s->outs / s->groups : 0;
    pack(s, &r, weight, alpha, 0);
    for (long o = 0; bias && o < s->outs; o++) r.bias[o] = alpha ? *alpha * bias[o] : bias[o];
    for (long n = 0; n < s->samples; n++, x += x_size, out += size) {
        float *y = kept ? kept + n * size : r.dense;
        read_input(s, &r, x, r.x);
        plan(&r, 0, y, kept ? size : 0), plan(&r, 1, out, size), plan(&r, 2, x + x_size, n + 1 < s->samples ? x_size : 0);
        convolve(&r, r.x, s->ins, r.packed, r.bias, s->outs, r.flat);
        if (!s->groups) {
            join_flat(s, &r, s->outs, out);
            continue;
        }
        copy_rows(r.flat, r.plane, r.stride, y, r.area, s->width, s->outs, s);
        for (long k = 0; k < s->groups; k++)
            normalise(y + k * each * r.area, each, r.area, gamma + k * each, beta + k * each, s->eps,
                      statistics + 2 * (n * s->groups + k), r.dense + k * each * r.area);
        join(r.dense, 0, r.area, s->outs, 1, r.area, out);
    }
    return 0;
}

/* Gradients of bias, gamma and beta must be zero; of input, weight and bias those that are NULL are left out. */
int conv_block_backward(const Shape *s, const float *x, const float *weight, const float *alpha,
                        const float *gamma, const float *beta, const float *kept, const float *statistics,
                        const float *grad, float *x_grad, float *weight_grad, float *bias_grad,
                        float *gamma_grad, float *beta_grad) {
    Room r = {0};
    if (!make_room(s, &r, 1)) return 1;
    long x_size = s->ins * r.in_area, size = s->outs * r.area, each = s->groups ? s->outs / s->groups : 0, at = 0;
    float factor = alpha ? *alpha : 1.0f;
    pack(s, &r, weight, alpha, 1);
    for (long n = 0; n < s->samples; n++) {
        float *padded_x = r.x + at * up(s->ins, BLOCK) * r.plane, *padded_g = r.g + at * up(s->outs, BLOCK) * r.plane;
        float *g = r.other;
        if (s->groups) split(grad + n * size, s->outs, 1, r.area, g, 0, r.area);
        else split_padded(s, &r, grad + n * size, s->outs, padded_g);
        for (long k = 0; k < s->groups; k++)
            normalise_backward(kept + n * size + k * each * r.area, each, r.area, gamma + k * each, beta + k * each,
                               statistics + 2 * (n * s->groups + k), g + k * each * r.area, gamma_grad + k * each,
                               beta_grad + k * each);
        if (s->groups) copy_rows(g, r.area, s->width, padded_g + r.first, r.plane, r.stride, s->outs, s);
        for (long c = 0; bias_grad && c < s->outs; c++)
            bias_grad[c] += factor * sum_of(padded_g + c * r.plane + r.first, r.length);
        if (weight_grad || s->pools) read_input(s, &r, x + n * x_size, padded_x);
        long more = n + 1 < s->samples;
        plan(&r, 0, x_grad + n * x_size, x_grad ? x_size : 0);
        plan(&r, 1, grad + (n + 1) * size, more * size), plan(&r, 2, kept + (n + 1) * size, s->groups ? more * size : 0);
        plan(&r, 3, x + (n + 1) * x_size, more * x_size);
        if (x_grad) {
            convolve(&r, padded_g, s->outs, r.packed, r.bias, s->ins, r.flat);
            if (s->pools) {
                copy_rows(r.flat, r.plane, r.stride, r.dense, r.area, s->width, s->ins, s);
                unpool(r.wide, r.dense, s->ins * s->height, s->width, r.other);
                join(r.other, 0, r.in_area, s->ins, 1, r.in_area, x_grad + n * x_size);
            } else {
                join_flat(s, &r, s->ins, x_grad + n * x_size);
            }
        }
        if (weight_grad && (++at == r.at_once || n + 1 == s->samples)) {
            correlate(s, &r, at);
            at = 0;
        }
    }
    if (weight_grad) sum_lanes(s, &r, factor, weight_grad);
    return 0;
}
