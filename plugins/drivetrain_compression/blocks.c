/* Encodings of drivetrain_compression in one pass over memory each, for processors.

   The bytes and numbers are those of codes.py, which says what they mean; only the
   mean of onebit adds up in another order. Floating point is exact IEEE (no fast math, nothing is
   contracted), so each integer and each number that comes back is that of torch, bit by bit. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { INT8, INT4, ONEBIT, TOPK }; /* formats */
enum { WRITE, ADD, KEEP };   /* what is done with the numbers of a message */

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "signs are packed as if the lowest byte of a number came first"
#endif

#define TILE 512  /* numbers of a message that are unpacked at a time: 2 KiB of the first cache */
#define LANES 16  /* partial sums of a mean: so many additions at a time */
#define inline_ static inline __attribute__((always_inline))

static const int64_t scale_bytes = sizeof(float);

inline_ int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

inline_ float at(const float *values, const float *errors, int64_t i) {
  return errors ? values[i] + errors[i] : values[i];
}

/* Return the largest size. As integers, bits of sizes are in the order of sizes, and NaN is above
   infinity: unlike a maximum of floats, that of integers is vectorized. */
inline_ float largest(const float *values, const float *errors, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    float value = at(values, errors, i);
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits &= INT32_MAX;
    most = bits > most ? bits : most;
  }
  float found;
  memcpy(&found, &most, sizeof found);
  return found;
}

inline_ float mean_size(const float *values, const float *errors, int64_t n) {
  float sums[LANES] = {0}, total = 0;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int lane = 0; lane < LANES; lane++) sums[lane] += fabsf(at(values, errors, i + lane));
  for (; i < n; i++) total += fabsf(at(values, errors, i));
  for (int lane = 0; lane < LANES; lane++) total += sums[lane];
  return total / (float)n;
}

/* The nearest integer, an even one of two; of NaN any. A scale of few denormal steps is rounded so
   much that a quotient may be larger than all integers of the format. */
inline_ int8_t rounded(float value, float steps) {
  const float nearest = rintf(value), most = nearest > steps ? steps : nearest;
  return (int8_t)(int32_t)(most < -steps ? -steps : most);
}

inline_ void encode_integers(int format, const float *values, const float *errors, float *scales,
                             int8_t *place, int64_t n, int64_t block) {
  const float steps = format == INT8 ? 127 : 7;
  const int64_t half = (n + 1) / 2;
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = least(start + block, n);
    const float *v = values + start, *e = errors ? errors + start : NULL;
    const float scale = largest(v, e, stop - start) / steps;
    const float divisor = scale == 0 ? 1 : scale;
    scales[start / block] = scale;
    if (format == INT8) {
      for (int64_t i = start; i < stop; i++) place[i] = rounded(at(values, errors, i) / divisor, steps);
      continue;
    }
    for (int64_t i = start; i < least(stop, half); i++)
      place[i] = rounded(at(values, errors, i) / divisor, steps);
    for (int64_t i = start > half ? start : half; i < stop; i++)
      place[i - half] += (int8_t)(16 * rounded(at(values, errors, i) / divisor, steps));
  }
}

inline_ void encode_signs(const float *values, const float *errors, float *scales, uint8_t *place,
                          int64_t n, int64_t block) {
  for (int64_t start = 0; start < n; start += block)
    scales[start / block] = mean_size(values + start, errors ? errors + start : NULL,
                                      least(block, n - start));
  uint8_t signs[TILE];
  for (int64_t start = 0; start < n; start += TILE) {
    const int64_t count = least(TILE, n - start);
    memset(signs, 0, sizeof signs);
    for (int64_t i = 0; i < count; i++) signs[i] = at(values, errors, start + i) >= 0;
    for (int64_t i = 0; i < count; i += 8) {
      uint64_t eight;
      memcpy(&eight, signs + i, sizeof eight);
      /* Of eight bytes of 0 or 1, the highest byte of the product has one in each bit. */
      place[(start + i) / 8] = (uint8_t)(eight * 0x0102040810204080u >> 56);
    }
  }
}

inline_ void encode_any(int format, const float *values, const float *errors, uint8_t *message,
                        int64_t n, int64_t block) {
  float *scales = (float *)message;
  uint8_t *place = message + scale_bytes * ((n + block - 1) / block);
  if (format == ONEBIT)
    encode_signs(values, errors, scales, place, n, block);
  else
    encode_integers(format, values, errors, scales, (int8_t *)place, n, block);
}

inline_ float sign(const uint8_t *place, int64_t i) { return place[i / 8] >> i % 8 & 1 ? 1 : -1; }

/* Unpack the signs of numbers from start on, in groups of the eight numbers of a byte. */
inline_ void unpack_signs(const uint8_t *place, int64_t start, int64_t count, float *found) {
  int64_t i = 0;
  for (; i < count && (start + i) % 8; i++) found[i] = sign(place, start + i);
  uint8_t bits[TILE];
  const uint8_t *bytes = place + (start + i) / 8;
  const int64_t whole = (count - i) / 8;
  for (int64_t k = 0; k < whole; k++) {
    /* Each of eight bytes keeps another bit. */
    const uint64_t eight = bytes[k] * 0x0101010101010101u & 0x8040201008040201u;
    memcpy(bits + 8 * k, &eight, sizeof eight);
  }
  for (int64_t k = 0; k < 8 * whole; k++) found[i + k] = bits[k] ? 1.0f : -1.0f;
  for (i += 8 * whole; i < count; i++) found[i] = sign(place, start + i);
}

inline_ void unpack(int format, const uint8_t *place, int64_t n, int64_t start, int64_t count,
                    float *found) {
  const int8_t *integers = (const int8_t *)place;
  if (format == INT8) {
    for (int64_t i = 0; i < count; i++) found[i] = integers[start + i];
  } else if (format == INT4) {
    const int64_t half = (n + 1) / 2;
    const int64_t lower = start < half ? least(count, half - start) : 0;
    for (int64_t i = 0; i < lower; i++) {
      const int both = integers[start + i];
      found[i] = (float)(both - 16 * ((both + 8) >> 4));
    }
    for (int64_t i = lower; i < count; i++) found[i] = (integers[start + i - half] + 8) >> 4;
  } else {
    unpack_signs(place, start, count, found);
  }
}

inline_ void decode_any(int format, int then, const uint8_t *message, float *values, float *errors,
                        int64_t n, int64_t block) {
  const float *scales = (const float *)message;
  const uint8_t *place = message + scale_bytes * ((n + block - 1) / block);
  float found[TILE];
  for (int64_t edge = 0; edge < n; edge += block) {
    const float scale = scales[edge / block];
    const int64_t end = least(edge + block, n);
    for (int64_t start = edge; start < end; start += TILE) {
      const int64_t count = least(TILE, end - start);
      float *v = values + start, *e = errors ? errors + start : NULL;
      unpack(format, place, n, start, count, found);
      if (then == WRITE)
        for (int64_t i = 0; i < count; i++) v[i] = found[i] * scale;
      else if (then == ADD)
        for (int64_t i = 0; i < count; i++) v[i] += found[i] * scale;
      else
        for (int64_t i = 0; i < count; i++) e[i] = v[i] + e[i] - found[i] * scale;
    }
  }
}

/* topk.c */
void encode_largest(const float *, const float *, uint8_t *, int64_t, int64_t);
void decode_largest(int, const uint8_t *, float *, float *, int64_t, int64_t);

/* Write n numbers, plus the errors if there are any, as a message. The option is the numbers of a
   block, or of those that are sent of a chunk. */
void encode(int format, const float *values, const float *errors, uint8_t *message, int64_t n,
            int64_t option) {
  if (format == TOPK) encode_largest(values, errors, message, n, option);
#define CASE(NAME)                                                        \
  if (format == NAME) {                                                   \
    if (errors)                                                           \
      encode_any(NAME, values, errors, message, n, option);                \
    else                                                                  \
      encode_any(NAME, values, NULL, message, n, option);                  \
  }
  CASE(INT8) CASE(INT4) CASE(ONEBIT)
#undef CASE
}

/* Write the n numbers of a message, add them to values, or keep what the message lacks of values
   and errors as errors. */
void decode(int format, int then, const uint8_t *message, float *values, float *errors, int64_t n,
            int64_t option) {
  if (format == TOPK) decode_largest(then, message, values, errors, n, option);
#define CASE(NAME)                                                                      \
  if (format == NAME) {                                                                 \
    if (then == WRITE) decode_any(NAME, WRITE, message, values, NULL, n, option);        \
    if (then == ADD) decode_any(NAME, ADD, message, values, NULL, n, option);            \
    if (then == KEEP) decode_any(NAME, KEEP, message, values, errors, n, option);        \
  }
  CASE(INT8) CASE(INT4) CASE(ONEBIT)
#undef CASE
}
