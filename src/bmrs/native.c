/* Gates on a processor: draws in float32, their means and the gradient of the KL in float64, and what they multiply. The
 * forms are those of bmrs/_truncated.py, one per place where mu can lie. What one unit needs is computed once; the loop
 * over its examples has no branches, so that the compiler computes several of them at a time. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define UNITS 16     /* units that are written side by side */
#define EXAMPLES 64  /* examples of a unit computed at a time */
#define INLINE static inline __attribute__((always_inline))

static inline uint32_t mixed(uint32_t n) {
    n = (n ^ (n >> 16)) * 0x7FEB352Du;
    n = (n ^ (n >> 15)) * 0x846CA68Bu;
    return n ^ (n >> 16);
}

static inline float lesser(float a, float b) { return a < b ? a : b; }
static inline float larger(float a, float b) { return a > b ? a : b; }

static inline float as_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline int32_t as_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* exp(x) for |x| up to 80, and what exp(±80) is beyond. */
static inline float exp_(float x) {
    x = lesser(larger(x, -80.0f), 80.0f);
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * as_float(((int32_t)n + 127) << 23);
}

/* log(x) of normal x > 0. */
static inline float log_(float x) {
    int32_t bits = as_bits(x) - 0x3F3504F3; /* from the exponent, so that the rest is within sqrt(2) of 1 */
    int32_t e = bits >> 23;
    float f = as_float((bits & 0x007FFFFF) + 0x3F3504F3) - 1.0f;
    float n = (float)e, z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return f - 0.5f * z + p * f * z - n * 2.12194440e-4f + n * 0.693359375f;
}

/* log(1 + x) for x > -1: Kahan's correction keeps small x exact. */
static inline float log1p_(float x) {
    float y = 1.0f + x, d = y - 1.0f;
    return d == 0.0f ? x : log_(larger(y, 1e-37f)) * (x / d);
}

/* The hazard of a standard normal at t >= 0 beyond t itself, to 5e-7. */
static inline float excess(float t) {
    float s = 1.0f / (1.0f + t * (float)(1.0 / 3.5));
    float p = 0.450200379f;
    p = p * s + -2.24749136f;
    p = p * s + 4.34857464f;
    p = p * s + -4.0007782f;
    p = p * s + 1.88229167f;
    p = p * s + -0.725968003f;
    p = p * s + 0.147473156f;
    p = p * s + 0.132361725f;
    p = p * s + 0.239807382f;
    p = p * s + 0.285698563f;
    p = p * s + 0.285714328f;
    return p * s;
}

/* The z with probability p <= 1/2 below it (M. Giles, Approximating the erfinv function). */
static inline float quantile(float p) {
    float w = -log_(4.0f * p * (1.0f - p));
    float a = w - 2.5f, b = sqrtf(larger(w, 0.0f)) - 3.0f;
    float near = 2.81022636e-08f, far = -0.000200214257f;
    near = near * a + 3.43273939e-07f;   far = far * b + 0.000100950558f;
    near = near * a - 3.5233877e-06f;    far = far * b + 0.00134934322f;
    near = near * a - 4.39150654e-06f;   far = far * b - 0.00367342844f;
    near = near * a + 0.00021858087f;    far = far * b + 0.00573950773f;
    near = near * a - 0.00125372503f;    far = far * b - 0.0076224613f;
    near = near * a - 0.00417768164f;    far = far * b + 0.00943887047f;
    near = near * a + 0.246640727f;      far = far * b + 1.00167406f;
    near = near * a + 1.50140941f;       far = far * b + 2.83297682f;
    return 1.41421356f * (2.0f * p - 1.0f) * (w < 5.0f ? near : far);
}

/* A gate, and where its draws go: theta and its derivatives by mu and log sigma, one number per example. */
typedef struct {
    float m, s, on, free; /* mu, sigma, 1 or 0 for a unit that is gone, sigma or 0 where log sigma is clamped */
    float low, high;      /* the bounds of log theta ... */
    float a, b, length;   /* ... in sigmas from mu, and from each other */
    uint32_t number;
    float *theta, *by_mu, *by_log_sigma;
} gate;

/* 24 random bits of every example, as probabilities q and 1 - q, neither of them 0. */
#define PROBABILITIES(k) \
    float q = ((float)(k) + 0.5f) * 5.9604645e-8f, o = ((float)(0xFFFFFF - (k)) + 0.5f) * 5.9604645e-8f

/* mu inside the bounds: invert Phi from the nearer tail. */
INLINE void inside(gate g, int64_t rows, const uint32_t *row) {
    float under = (float)(0.5 * erfc(-g.a * M_SQRT1_2)), over = (float)(0.5 * erfc(g.b * M_SQRT1_2));
    float mass = g.length > 4.0f ? 1.0f - under - over : (float)(0.5 * (erf(g.b * M_SQRT1_2) - erf(g.a * M_SQRT1_2)));
    for (int64_t i = 0; i < rows; i++) {
        int32_t k = mixed(row[i] ^ g.number) >> 8;
        PROBABILITIES(k);
        float lower = under + q * mass, upper = over + o * mass;
        float z = quantile(larger(lesser(lesser(lower, upper), 0.5f), 1e-37f));
        z = lower <= upper ? z : -z;
        z = lesser(larger(z, g.a), g.b);
        float at_a = exp_(log_(o) + 0.5f * (z - g.a) * (z + g.a));
        float at_b = exp_(log_(q) + 0.5f * (z - g.b) * (z + g.b));
        float x = g.on * exp_(lesser(larger(g.m + g.s * z, g.low), g.high));
        g.theta[i] = x;
        g.by_mu[i] = x * (1.0f - at_a - at_b);
        g.by_log_sigma[i] = x * g.free * (z - g.a * at_a - g.b * at_b);
    }
}

/* mu at or beyond a bound: the depth of z behind it, t sigmas from mu, by one of Halley's steps from a hazard that
 * grows linearly. "sighted": whether the other bound is near enough to matter. */
INLINE void beyond(gate g, int64_t rows, const uint32_t *row, float t, int near_b, int sighted) {
    float spare = excess(t), rate = t + spare, inverse = 1.0f / rate;
    float rest = excess(t + g.length), end = t + g.length + rest, gain = (g.length + rest - spare) / end;
    float share = sighted ? expf(-g.length * (t + 0.5f * g.length)) * rate / end : 0.0f;
    float sign = near_b ? -1.0f : 1.0f, bound = near_b ? g.high : g.low;
    int32_t turned = near_b ? 0xFFFFFF : 0;
    for (int64_t i = 0; i < rows; i++) {
        int32_t k = (int32_t)(mixed(row[i] ^ g.number) >> 8) ^ turned;
        PROBABILITIES(k);
        float h = -log_(sighted ? o + q * share : o);
        float depth = 2.0f * h / (rate + sqrtf(rate * (rate + 2.0f * h * spare)));
        if (sighted) depth = lesser(depth, g.length);
        float here = excess(t + depth), there = t + depth + here;
        float miss = depth * (t + 0.5f * depth) + log_(there * inverse) - h;
        depth = larger(depth - miss / (there - 0.5f * miss * here), 0.0f);
        if (sighted) depth = lesser(depth, g.length);
        here = excess(t + depth);
        float by_m = (depth + here - spare) / (t + depth + here), by_s = depth + t * by_m;
        if (sighted) {
            float at_far = q * exp_(-(g.length - depth) * (t + 0.5f * (g.length + depth)));
            by_m -= at_far * gain;
            by_s = depth + t * by_m - g.length * at_far;
        }
        float x = g.on * exp_(lesser(larger(bound + sign * g.s * depth, g.low), g.high));
        g.theta[i] = x;
        g.by_mu[i] = x * by_m;
        g.by_log_sigma[i] = x * sign * g.free * by_s;
    }
}

/* theta, its derivative by mu and by log sigma: [members, examples, units]. */
void bmrs_draw(int64_t members, int64_t examples, int64_t units, const float *mu, const float *log_sigma,
               const uint8_t *alive, const int64_t *seeds, int64_t step, const int64_t *numbers, float low, float high,
               float least, float most, float *theta, float *by_mu, float *by_log_sigma) {
    static const float reach = 40.0f; /* exp(-reach) is nothing beside what float32 holds */
    uint32_t now = mixed((uint32_t)step), row[EXAMPLES];
    float value[UNITS][EXAMPLES], slope[UNITS][EXAMPLES], width[UNITS][EXAMPLES];
    for (int64_t member = 0; member < members; member++) {
        uint32_t key = mixed((uint32_t)seeds[member] ^ now);
        for (int64_t begin = 0; begin < examples; begin += EXAMPLES) {
            int64_t rows = examples - begin < EXAMPLES ? examples - begin : EXAMPLES;
            for (int64_t i = 0; i < rows; i++) row[i] = mixed(key + (uint32_t)(begin + i));
            for (int64_t first = 0; first < units; first += UNITS) {
                int64_t some = units - first < UNITS ? units - first : UNITS;
                for (int64_t j = 0; j < some; j++) {
                    int64_t at = member * units + first + j;
                    float m = mu[at], raw = log_sigma[at], s = expf(lesser(larger(raw, least), most));
                    gate g = {
                        .m = m, .s = s, .low = low, .high = high,
                        .on = m != m || raw != raw ? NAN : alive[at] ? 1.0f : 0.0f, /* what is not a number is seen */
                        .free = raw >= least && raw <= most ? s : 0.0f,
                        .a = (low - m) / s, .b = (high - m) / s, .length = (high - low) / s,
                        .number = mixed((uint32_t)numbers[at]),
                        .theta = value[j], .by_mu = slope[j], .by_log_sigma = width[j],
                    };
                    float t = larger(g.a, -g.b);
                    if (t < 0.0f)
                        inside(g, rows, row);
                    else if (g.length * (t + 0.5f * g.length) < reach)
                        beyond(g, rows, row, t, -g.b >= g.a, 1);
                    else
                        beyond(g, rows, row, t, -g.b >= g.a, 0);
                }
                for (int64_t i = 0; i < rows; i++) {
                    int64_t to = (member * examples + begin + i) * units + first;
                    for (int64_t j = 0; j < some; j++) {
                        theta[to + j] = value[j][i];
                        by_mu[to + j] = slope[j][i];
                        by_log_sigma[to + j] = width[j][i];
                    }
                }
            }
        }
    }
}

/* The sums over examples of grad times either derivative: [members, units]. */
void bmrs_sums(int64_t members, int64_t examples, int64_t units, const float *grad, const float *by_mu,
               const float *by_log_sigma, float *to_mu, float *to_log_sigma) {
    for (int64_t member = 0; member < members; member++) {
        float *m = to_mu + member * units, *s = to_log_sigma + member * units;
        memset(m, 0, units * sizeof *m);
        memset(s, 0, units * sizeof *s);
        for (int64_t i = 0; i < examples; i++) {
            int64_t at = (member * examples + i) * units;
            for (int64_t j = 0; j < units; j++) {
                m[j] += grad[at + j] * by_mu[at + j];
                s[j] += grad[at + j] * by_log_sigma[at + j];
            }
        }
    }
}

/* The hazard at t, what it has beyond t, and 1 - their product. */
static void hazard(double t, double *rate, double *spare, double *variance) {
    double y = 1.0 / (t * t);
    *rate = 0.7978845608028654 / (exp(0.5 * t * t) * erfc(t * M_SQRT1_2));
    *spare = *rate - t;
    *variance = 1.0 - *rate * *spare;
    if (t > 25.0) {
        *spare = (1 + y * (-2 + y * (10 + y * (-74 + y * (706 + y * (-8162 + y * 110410)))))) / t;
        *variance = y * (1 + y * (-6 + y * (50 + y * (-518 + y * (6354 - y * 89782)))));
        *rate = t + *spare;
    }
}

static double vanishing(double x) { return exp(x > -200.0 ? x : -200.0); }

/* The gradient of the sum of weight times KL by mu and by log sigma of every gate. */
void bmrs_kl_gradient(int64_t gates, const float *mu, const float *log_sigma, const float *weights, double low,
                      double high, double least, double most, float *by_mu, float *by_log_sigma) {
    for (int64_t n = 0; n < gates; n++) {
        double m = mu[n], raw = log_sigma[n];
        double s = exp(raw < least ? least : raw > most ? most : raw);
        double a = (low - m) / s, b = (high - m) / s, length = (high - low) / s;
        double t = a > -b ? a : -b, to_mu, to_log_sigma;
        if (t < 0.0) {
            double mass = length > 4.0 ? 1.0 - 0.5 * erfc(-a * M_SQRT1_2) - 0.5 * erfc(b * M_SQRT1_2)
                                       : 0.5 * (erf(b * M_SQRT1_2) - erf(a * M_SQRT1_2));
            double at_a = 0.3989422804014327 * vanishing(-0.5 * a * a) / mass;
            double at_b = 0.3989422804014327 * vanishing(-0.5 * b * b) / mass;
            double first = at_a - at_b, second = 1.0 + a * at_a - b * at_b;
            double third = 2.0 * first + a * a * at_a - b * b * at_b;
            double fourth = 3.0 * second + a * a * a * at_a - b * b * b * at_b;
            to_mu = -0.5 * (third - first * second);
            to_log_sigma = -0.5 * (fourth - second * second);
        } else {
            double rate, spare, variance, far_, beyond, unused;
            hazard(t, &rate, &spare, &variance);
            far_ = t + length; /* out of reach, if nothing says otherwise */
            beyond = 0.0;
            if (length * (t + 0.5 * length) < 200.0) hazard(t + length, &far_, &beyond, &unused);
            double decay = vanishing(-length * (t + 0.5 * length));
            double share = decay * rate / far_, rest = 1.0 - share;
            double odds = rate * share / rest, density = rate * decay / rest, ratio = share / rest;
            double gain = length + beyond - spare, end = t + length;
            double odds_t = odds * (spare - gain / rest), odds_l = -odds * far_ / rest;
            double density_t = density * (spare - length - gain * ratio), density_l = -density * (end + far_ * ratio);
            double near_t = spare + t * variance;
            double by_t = 0.5 * (near_t - odds - t * odds_t + density + end * density_t) - gain * ratio;
            double by_l = 0.5 * (density + end * density_l - t * odds_l) - far_ * ratio;
            to_mu = -b >= a ? by_t : -by_t;
            to_log_sigma = -1.0 - t * by_t - length * by_l;
        }
        by_mu[n] = (float)(weights[n] * to_mu / s);
        by_log_sigma[n] = raw >= least && raw <= most ? (float)(weights[n] * to_log_sigma) : 0.0f;
    }
}

/* The log of a normal's mass from t >= 0 on over the given length, plus t * t / 2. */
static double outer(double t, double length) {
    double rate, far_, unused, other;
    hazard(t, &rate, &unused, &other);
    hazard(t + length, &far_, &unused, &other);
    return log(0.3989422804014327 / rate) + log1p(-vanishing(-length * (t + 0.5 * length)) * rate / far_);
}

/* The log of a normal's mass between bounds with 0 between them. */
static double inner(double a, double b) {
    if (b - a > 4.0) return log1p(-0.5 * erfc(-a * M_SQRT1_2) - 0.5 * erfc(b * M_SQRT1_2));
    return log(0.5 * (erf(b * M_SQRT1_2) - erf(a * M_SQRT1_2)));
}

/* E[theta] of every gate: theta tilts the normal by sigma, so the mean is a ratio of two masses. */
void bmrs_mean(int64_t gates, const float *mu, const float *log_sigma, double low, double high, double least,
               double most, float *mean) {
    for (int64_t n = 0; n < gates; n++) {
        double m = mu[n], raw = log_sigma[n];
        double s = exp(raw < least ? least : raw > most ? most : raw);
        double a = (low - m) / s, b = (high - m) / s, length = (high - low) / s;
        double a1 = a - s, b1 = b - s, t = a > -b ? a : -b, t1 = a1 > -b1 ? a1 : -b1, found;
        if (t < 0.0) {
            found = t1 < 0.0 ? m + 0.5 * s * s + inner(a1, b1) : high - 0.5 * b * b + outer(t1, length);
            found -= inner(a, b);
        } else if (-b >= a) {
            found = high + outer(t1, length) - outer(t, length);
        } else {
            double beyond = -b1 > a1 ? -0.5 * length * (a1 + b1) : 0.0;
            found = low + (t1 < 0.0 ? 0.5 * a1 * a1 + inner(a1, b1) : outer(t1, length) + beyond) - outer(t, length);
        }
        mean[n] = (float)exp(found);
    }
}

/* x times theta, and both gradients from what comes back, each number read once. x lies as [rows, before, units, after]
 * where "before" or "after" is 1; stride: of the rows of theta. Numbers are float32, or bfloat16 held as their upper
 * halves; sums are float32. */

static inline float widened(uint16_t half) { return as_float((int32_t)((uint32_t)half << 16)); }

static inline uint16_t narrowed(float x) { /* to the nearest, ties to even; what is not a number stays so */
    uint32_t bits = (uint32_t)as_bits(x);
    return x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float same(float x) { return x; }

#define SCALED(NAME, NUMBER, READ, WRITE)                                                                              \
    void NAME(int64_t rows, int64_t before, int64_t units, int64_t after, int64_t stride, const NUMBER *restrict x,    \
              const float *restrict theta, NUMBER *restrict out) {                                                     \
        for (int64_t row = 0; row < rows; row++, theta += stride) {                                                    \
            if (after > 1)                                                                                             \
                for (int64_t u = 0; u < units; u++, x += after, out += after)                                          \
                    for (int64_t i = 0; i < after; i++) out[i] = WRITE(READ(x[i]) * theta[u]);                         \
            else                                                                                                       \
                for (int64_t i = 0; i < before; i++, x += units, out += units)                                         \
                    for (int64_t u = 0; u < units; u++) out[u] = WRITE(READ(x[u]) * theta[u]);                         \
        }                                                                                                              \
    }

SCALED(bmrs_scale_f32, float, same, same)
SCALED(bmrs_scale_bf16, uint16_t, widened, narrowed)

#define SLOPES(NAME, NUMBER, READ, WRITE)                                                                              \
    void NAME(int64_t rows, int64_t before, int64_t units, int64_t after, int64_t stride, const NUMBER *restrict grad, \
              const NUMBER *restrict x, const float *restrict theta, NUMBER *restrict to_x, float *restrict to_theta) {\
        for (int64_t row = 0; row < rows; row++, theta += stride, to_theta += units) {                                 \
            memset(to_theta, 0, units * sizeof *to_theta);                                                             \
            if (after > 1)                                                                                             \
                for (int64_t u = 0; u < units; u++, x += after, grad += after, to_x += after) {                        \
                    float sum = 0.0f, t = theta[u];                                                                    \
                    _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < after; i++) {                       \
                        float g = READ(grad[i]);                                                                       \
                        sum += g * READ(x[i]);                                                                         \
                        to_x[i] = WRITE(g * t);                                                                        \
                    }                                                                                                  \
                    to_theta[u] = sum;                                                                                 \
                }                                                                                                      \
            else                                                                                                       \
                for (int64_t i = 0; i < before; i++, x += units, grad += units, to_x += units)                         \
                    for (int64_t u = 0; u < units; u++) {                                                              \
                        float g = READ(grad[u]);                                                                       \
                        to_theta[u] += g * READ(x[u]);                                                                 \
                        to_x[u] = WRITE(g * theta[u]);                                                                 \
                    }                                                                                                  \
        }                                                                                                              \
    }

SLOPES(bmrs_slopes_f32, float, same, same)
SLOPES(bmrs_slopes_bf16, uint16_t, widened, narrowed)
