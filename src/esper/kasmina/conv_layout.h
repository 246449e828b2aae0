/* Vectors, room to work in, and the layout of features: what conv_block.c computes with. */

#include <stdlib.h>
#include <string.h>

#define EVEN8 0, 2, 4, 6, 8, 10, 12, 14
#define ODD8 1, 3, 5, 7, 9, 11, 13, 15
#define LOW8 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH8 4, 12, 5, 13, 6, 14, 7, 15
#ifdef __AVX512F__ /* 32 registers of 16 floats */
enum { LANES = 16, VECTORS = 3, TAPS = 3 };
#define EVEN EVEN8, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD ODD8, 17, 19, 21, 23, 25, 27, 29, 31
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
enum { LANES = 8, VECTORS = 1, TAPS = 1 };
#define EVEN EVEN8
#define ODD ODD8
#define LOW LOW8
#define HIGH HIGH8
#endif
/* BLOCK: output channels whose sums are in registers at once. LINES: of the cache, ordered ahead at once. */
enum { BLOCK = 8, LARGEST_KERNEL = 7, LINES = 64 };

#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int mask8 __attribute__((vector_size(32), aligned(4), may_alias));

typedef struct {
    long samples, ins, outs, height, width, kernel; /* of the convolution */
    long pools, groups;                             /* groups 0: neither norm nor ReLU */
    float eps;
} Shape;

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec8 load8(const float *p) { return *(const vec8 *)p; }
INLINE void store8(float *p, vec8 v) { *(vec8 *)p = v; }
INLINE long up(long n, long to) { return (n + to - 1) / to * to; }

/* --- memory ---------------------------------------------------------------------------------------- */

typedef struct {
    long pad, stride, plane, first;            /* of padded planes: row stride, size, place of the first value */
    long length, area, in_area, taps, at_once; /* at_once: samples whose padded planes are kept */
    long offset[LARGEST_KERNEL * LARGEST_KERNEL]; /* of a tap, from where its output is */
    float *x, *g, *flat, *dense, *wide, *other, *packed, *bias, *sums;
    const float *ahead[5], *until[5]; /* memory that is needed soon */
} Room;

static _Thread_local float *memory;
static _Thread_local size_t held;

static int make_room(const Shape *s, Room *r, int backward) {
    long ins = up(s->ins, BLOCK), outs = up(s->outs, BLOCK), most = ins > outs ? ins : outs, total = 0;
    r->pad = s->kernel / 2, r->taps = s->kernel * s->kernel, r->area = s->height * s->width;
    r->stride = s->width + r->pad, r->length = s->height * r->stride;
    r->first = up(r->pad * r->stride + r->pad, LANES);
    r->plane = up(2 * r->first + r->length + VECTORS * LANES, LANES);
    r->in_area = s->pools ? 4 * r->area : r->area;
    r->at_once = backward ? 1 + 16384 / ((ins + outs) * r->plane) : 1;
    for (long t = 0; t < r->taps; t++)
        r->offset[t] = r->first + (t / s->kernel - r->pad) * r->stride + t % s->kernel - r->pad;
    float **places[] = {&r->x, &r->g, &r->bias, &r->sums, &r->flat, &r->dense, &r->wide, &r->other, &r->packed};
    long sums = backward ? outs * s->ins * r->taps * LANES : 0;
    long sizes[] = {r->at_once * ins * r->plane, r->at_once * outs * r->plane, most, sums, most * r->plane,
                    most * r->in_area, most * r->in_area, most * r->in_area, ins * outs * r->taps};
    for (int i = 0; i < 9; i++) total += up(sizes[i], LANES);
    if (total * sizeof(float) > held) {
        free(memory);
        memory = aligned_alloc(64, up(total * sizeof(float), 64));
        held = memory ? total * sizeof(float) : 0;
    }
    float *at = memory;
    for (int i = 0; i < 9; at += up(sizes[i++], LANES)) *places[i] = at;
    if (memory) memset(memory, 0, (r->flat - memory) * sizeof(float));
    return memory != NULL;
}

/* --- layout: channels_last to planes and back ------------------------------------------------------ */

INLINE void split_tile(const float *x, long step, float *planes, long plane, const int n) {
    vec v[LANES], t[LANES];
    for (int i = 0; i < n; i++) v[i] = load(x + i * step);
    for (int done = 1; done < n; done *= 2) {
        for (int i = 0; i < n / 2; i++) {
            t[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], EVEN);
            t[i + n / 2] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], ODD);
        }
        for (int i = 0; i < n; i++) v[i] = t[i];
    }
    for (int i = 0; i < n; i++) store(planes + i * plane, v[i]);
}

INLINE void join_tile(const float *planes, long plane, float *x, long step, const int n) {
    vec v[LANES], t[LANES];
    for (int i = 0; i < n; i++) v[i] = load(planes + i * plane);
    for (int done = 1; done < n; done *= 2) {
        for (int i = 0; i < n / 2; i++) {
            t[2 * i] = __builtin_shufflevector(v[i], v[i + n / 2], LOW);
            t[2 * i + 1] = __builtin_shufflevector(v[i], v[i + n / 2], HIGH);
        }
        for (int i = 0; i < n; i++) v[i] = t[i];
    }
    for (int i = 0; i < n; i++) store(x + i * step, v[i]);
}

/* Planes: rows of `width` values, `stride` apart, and from channel to channel `plane`. */
static void split(const float *x, long channels, long rows, long width, float *planes, long stride, long plane) {
    for (long row = 0; row < rows; row++, x += width * channels, planes += stride) {
        long p = 0;
        if (channels == 8)
            for (; p + LANES <= width; p += LANES) split_tile(x + p * 8, LANES, planes + p, plane, 8);
        else if (channels % LANES == 0)
            for (; p + LANES <= width; p += LANES)
                for (long c = 0; c < channels; c += LANES)
                    split_tile(x + p * channels + c, channels, planes + c * plane + p, plane, LANES);
        else if (channels == 3)
            for (; p < width; p++)
                for (int c = 0; c < 3; c++) planes[c * plane + p] = x[p * 3 + c];
        for (; p < width; p++)
            for (long c = 0; c < channels; c++) planes[c * plane + p] = x[p * channels + c];
    }
}

static void join(const float *planes, long stride, long plane, long channels, long rows, long width, float *x) {
    for (long row = 0; row < rows; row++, x += width * channels, planes += stride) {
        long p = 0;
        if (channels == 8)
            for (; p + LANES <= width; p += LANES) join_tile(planes + p, plane, x + p * 8, LANES, 8);
        else if (channels % LANES == 0)
            for (; p + LANES <= width; p += LANES)
                for (long c = 0; c < channels; c += LANES)
                    join_tile(planes + c * plane + p, plane, x + p * channels + c, channels, LANES);
        for (; p < width; p++)
            for (long c = 0; c < channels; c++) x[p * channels + c] = planes[c * plane + p];
    }
}

static void copy_rows(const float *from, long from_plane, long from_stride, float *to, long to_plane, long to_stride,
                      long channels, const Shape *s) {
    for (long c = 0; c < channels; c++)
        for (long row = 0; row < s->height; row++) {
            const float *source = from + c * from_plane + row * from_stride;
            float *target = to + c * to_plane + row * to_stride;
            long i = 0;
            for (; i + 8 <= s->width; i += 8) store8(target + i, load8(source + i));
            for (; i < s->width; i++) target[i] = source[i];
        }
}

/* --- pooling: as torch does, NaN is larger than all, and of equals the first gets the gradient ------- */

typedef struct { vec8 a, b, c, d; } Quad; /* eight outputs' four inputs */

INLINE vec8 choose(mask8 first, vec8 a, vec8 b) { return (vec8)(((mask8)a & first) | ((mask8)b & ~first)); }
INLINE vec8 larger(vec8 a, vec8 b) { return choose((b > a) | (b != b), b, a); }
INLINE vec8 largest(Quad q) { return larger(larger(q.a, q.b), larger(q.c, q.d)); }

INLINE Quad quad(const float *x, long row) {
    vec8 a = load8(x), b = load8(x + 8), c = load8(x + row), d = load8(x + row + 8);
    return (Quad){__builtin_shufflevector(a, b, EVEN8), __builtin_shufflevector(a, b, ODD8),
                  __builtin_shufflevector(c, d, EVEN8), __builtin_shufflevector(c, d, ODD8)};
}

static void pool(const float *x, long rows, long width, float *out) {
    for (long r = 0; r < rows; r++, x += 4 * width)
        for (long i = 0; i < width; i += 8, out += 8) store8(out, largest(quad(x + 2 * i, 2 * width)));
}

static void unpool(const float *x, const float *grad, long rows, long width, float *out) {
    const vec8 none = {};
    for (long r = 0; r < rows; r++, x += 4 * width, out += 4 * width)
        for (long i = 0; i < width; i += 8, grad += 8) {
            Quad q = quad(x + 2 * i, 2 * width);
            vec8 most = largest(q), rest = load8(grad), part[4], inputs[3] = {q.a, q.b, q.c};
            for (int k = 0; k < 3; k++) {
                part[k] = choose(inputs[k] == most, rest, none);
                rest = choose(inputs[k] == most, none, rest);
            }
            part[3] = rest;
            for (int k = 0; k < 4; k += 2) {
                store8(out + k * width + 2 * i, __builtin_shufflevector(part[k], part[k + 1], LOW8));
                store8(out + k * width + 2 * i + 8, __builtin_shufflevector(part[k], part[k + 1], HIGH8));
            }
        }
}

static void fetch(Room *r, long lines) {
    for (int i = 0; i < 5 && lines > 0; i++)
        for (; r->ahead[i] < r->until[i] && lines > 0; r->ahead[i] += 16, lines--) __builtin_prefetch(r->ahead[i], 1, 2);
}

INLINE void plan(Room *r, int i, const float *p, long floats) { r->ahead[i] = p, r->until[i] = p + floats; }
