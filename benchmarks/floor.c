/* What the machine can do: fused multiply-add, 2^x, and one attention pair, by hand in vector registers.
   Compiled by floor.py with -march=native; vectors are 64 bytes, which narrower machines split. */
#include <stddef.h>
#include <stdint.h>

typedef double vd __attribute__((vector_size(64)));
typedef int64_t vl __attribute__((vector_size(64)));
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

static inline vd exp2_vd(vd x) {
    const double magic = 6755399441055744.0; /* 1.5 * 2^52 */
    vd t = x + magic, r = x - (t - magic), p = r * 7.0741945626131048e-9 + 1.0208690835930371e-7;
    p = p * r + 1.3215432534254118e-6; p = p * r + 1.5252657257186042e-5;
    p = p * r + 0.00015403530463727982; p = p * r + 0.0013333558230170627;
    p = p * r + 0.0096181291075872534; p = p * r + 0.05550410866444768;
    p = p * r + 0.2402265069591016; p = p * r + 0.69314718055994998; p = p * r + 1.0;
    return (vd)((vl)p + ((vl)t << 52));
}

static inline vf exp2_vf(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    vf t = x + magic, r = x - (t - magic), p = r * 0.00015469732f + 0.0013400432f;
    p = p * r + 0.0096180256f; p = p * r + 0.055503272f; p = p * r + 0.24022651f; p = p * r + 0.69314721f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)t << 23));
}

/* queries q[n][D] in bits, keys k[D][m] as rows, out[n][D+1]: sums of 2^<q,k> k and of 2^<q,k>; n a multiple of 4 */
#define PAIR(NAME, T, V, WIDTH, EXP2, D)                                                                     \
    void NAME(const T *q, const T *k, T *out, size_t n, size_t m) {                                          \
        for (size_t i = 0; i < n; i += 4) {                                                                  \
            V total[4][D + 1];                                                                               \
            for (int a = 0; a < 4; a++)                                                                      \
                for (int c = 0; c <= D; c++) total[a][c] = (V){0};                                           \
            for (size_t j = 0; j < m; j += WIDTH) {                                                          \
                V key[D];                                                                                    \
                for (int c = 0; c < D; c++) key[c] = *(const V *)(k + c * m + j);                            \
                for (int a = 0; a < 4; a++) {                                                                \
                    const T *query = q + (i + a) * D;                                                        \
                    V s = key[0] * query[0];                                                                 \
                    for (int c = 1; c < D; c++) s += key[c] * query[c];                                      \
                    V e = EXP2(s);                                                                           \
                    for (int c = 0; c < D; c++) total[a][c] += e * key[c];                                   \
                    total[a][D] += e;                                                                        \
                }                                                                                            \
            }                                                                                                \
            for (int a = 0; a < 4; a++)                                                                      \
                for (int c = 0; c <= D; c++) {                                                               \
                    T sum = 0;                                                                               \
                    for (int l = 0; l < WIDTH; l++) sum += total[a][c][l];                                   \
                    out[(i + a) * (D + 1) + c] = sum;                                                        \
                }                                                                                            \
        }                                                                                                    \
    }

#define DIMENSION(D)                                 \
    PAIR(pair_float64_##D, double, vd, 8, exp2_vd, D) \
    PAIR(pair_float32_##D, float, vf, 16, exp2_vf, D)

DIMENSION(2)
DIMENSION(3)
DIMENSION(4)
DIMENSION(8)

#define EXP(NAME, T, V, WIDTH, EXP2)                                                                       \
    void NAME(const T *x, T *y, size_t n, size_t rounds) {                                                 \
        for (size_t r = 0; r < rounds; r++) {                                                              \
            for (size_t j = 0; j < n; j += WIDTH) *(V *)(y + j) = EXP2(*(const V *)(x + j));               \
            __asm__ volatile("" ::"r"(y) : "memory");                                                      \
        }                                                                                                  \
    }

EXP(exp_float64, double, vd, 8, exp2_vd)
EXP(exp_float32, float, vf, 16, exp2_vf)

/* `rounds` times 12 independent vector multiply-adds */
#define FMA(NAME, T, V, WIDTH)                                                \
    double NAME(size_t rounds) {                                              \
        V a[12], b = (V){0} + (T)0.999999, c = (V){0} + (T)1e-9;              \
        for (int i = 0; i < 12; i++) a[i] = (V){0} + (T)i;                    \
        for (size_t r = 0; r < rounds; r++)                                   \
            for (int i = 0; i < 12; i++) a[i] = a[i] * b + c;                 \
        double sum = 0;                                                       \
        for (int i = 0; i < 12; i++)                                          \
            for (int l = 0; l < WIDTH; l++) sum += a[i][l];                   \
        return sum;                                                           \
    }

FMA(fma_float64, double, vd, 8)
FMA(fma_float32, float, vf, 16)
