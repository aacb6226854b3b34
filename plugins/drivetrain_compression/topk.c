/* The code topk of codes.py in one pass over memory: which numbers, their codebook, and the bytes. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { WRITE, ADD, KEEP }; /* what is done with the numbers of a message: as in blocks.c */

#define CHUNK 4096
#define WORD 64 /* bits of a word of a set of places */
#define WORDS (CHUNK / WORD)
#define BINS 4
#define SIZE_BITS 31

/* Return the largest bound that at least keep of n sizes reach, bit by bit from the highest. */
static int32_t bound_of(const int32_t *sizes, int64_t n, int64_t keep) {
  int32_t bound = 0;
  for (int bit = SIZE_BITS - 1; bit >= 0; bit--) {
    const int32_t higher = bound | (int32_t)1 << bit;
    int32_t count = 0;
    for (int64_t i = 0; i < n; i++) count += sizes[i] >= higher;
    if (count >= keep) bound = higher;
  }
  return bound;
}

/* Write the places of the largest sizes in their order; of equal ones the first are taken.

   A chunk is a table of some rows. As many columns as numbers are kept have maxima of at least some
   bound, so all that are kept reach it, too: only columns that reach it are searched. */
static void largest(const int32_t *sizes, int64_t keep, int32_t *places) {
  const int64_t width = keep <= 512 ? 512 : 1024;
  int32_t maxima[1024], found[CHUNK], at[CHUNK];
  memcpy(maxima, sizes, (size_t)width * sizeof *sizes);
  for (int64_t row = width; row < CHUNK; row += width)
    for (int64_t i = 0; i < width; i++)
      maxima[i] = sizes[row + i] > maxima[i] ? sizes[row + i] : maxima[i];
  const int32_t first = bound_of(maxima, width, keep);
  int64_t count = 0;
  for (int64_t column = 0; column < width; column++) {
    if (maxima[column] < first) continue;
    for (int64_t i = column; i < CHUNK; i += width) {
      found[count] = sizes[i];
      at[count] = (int32_t)i;
      count += sizes[i] >= first;
    }
  }
  const int32_t bound = bound_of(found, count, keep);
  uint64_t above[WORDS] = {0}, equal[WORDS] = {0};
  int64_t left = keep; /* for sizes that are equal to the bound */
  for (int64_t i = 0; i < count; i++) {
    const uint64_t bit = (uint64_t)1 << at[i] % WORD;
    if (found[i] > bound) above[at[i] / WORD] |= bit, left--;
    if (found[i] == bound) equal[at[i] / WORD] |= bit;
  }
  for (int word = 0; word < WORDS; word++) {
    for (uint64_t bits = above[word] | equal[word]; bits; bits &= bits - 1) {
      const int bit = __builtin_ctzll(bits);
      if (above[word] >> bit & 1 || left-- > 0) *places++ = word * WORD + bit;
    }
  }
}

/* Write the mean of each bin, and the bin of each number. */
static void write_book(const float *numbers, int64_t keep, float *book, uint8_t *bins) {
  double squares = 0, sums[BINS] = {0}, counts[BINS] = {0};
  for (int64_t i = 0; i < keep; i++) squares += (double)numbers[i] * numbers[i];
  const float width = (float)sqrt(squares / (double)keep) * 1.5f; /* three deviations, two bins */
  for (int64_t i = 0; i < keep; i++) {
    const float scaled = numbers[i] / width + 2;
    const int bin = isnan(scaled) ? 2 : scaled < 1 ? 0 : scaled < 2 ? 1 : scaled < 3 ? 2 : 3;
    bins[i] = (uint8_t)bin;
    sums[bin] += numbers[i];
    counts[bin] += 1;
  }
  for (int bin = 0; bin < BINS; bin++)
    book[bin] = (float)(sums[bin] / (counts[bin] > 0 ? counts[bin] : 1));
}

void encode_largest(const float *values, const float *errors, uint8_t *message, int64_t n,
                    int64_t keep) {
  const int64_t chunks = (n + CHUNK - 1) / CHUNK;
  float *books = (float *)message;
  uint8_t *place = message + chunks * BINS * (int64_t)sizeof(float);
  uint8_t *code = place + chunks * keep * 3 / 2;
  float all[CHUNK], numbers[1024];
  int32_t sizes[CHUNK], places[1024];
  uint8_t bins[1024];
  for (int64_t start = 0; start < n; start += CHUNK, books += BINS) {
    const int64_t count = n - start < CHUNK ? n - start : CHUNK;
    memset(all + count, 0, (size_t)(CHUNK - count) * sizeof *all);
    if (errors)
      for (int64_t i = 0; i < count; i++) all[i] = values[start + i] + errors[start + i];
    else
      memcpy(all, values + start, (size_t)count * sizeof *all);
    memcpy(sizes, all, sizeof sizes);
    for (int64_t i = 0; i < CHUNK; i++) sizes[i] &= INT32_MAX; /* NaN is above infinity */
    largest(sizes, keep, places);
    for (int64_t i = 0; i < keep; i++) numbers[i] = all[places[i]];
    write_book(numbers, keep, books, bins);
    for (int64_t i = 0; i < keep; i += 2, place += 3) {
      place[0] = (uint8_t)places[i];
      place[1] = (uint8_t)(places[i] >> 8 | (places[i + 1] & 15) << 4);
      place[2] = (uint8_t)(places[i + 1] >> 4);
    }
    for (int64_t i = 0; i < keep; i += 4)
      *code++ = (uint8_t)(bins[i] | bins[i + 1] << 2 | bins[i + 2] << 4 | bins[i + 3] << 6);
  }
}

void decode_largest(int then, const uint8_t *message, float *values, float *errors, int64_t n,
                    int64_t keep) {
  const int64_t chunks = (n + CHUNK - 1) / CHUNK;
  const float *books = (const float *)message;
  const uint8_t *place = message + chunks * BINS * (int64_t)sizeof(float);
  const uint8_t *code = place + chunks * keep * 3 / 2;
  if (then == WRITE) memset(values, 0, (size_t)n * sizeof *values);
  if (then == KEEP)
    for (int64_t i = 0; i < n; i++) errors[i] += values[i];
  for (int64_t start = 0; start < n; start += CHUNK, books += BINS, code += keep / 4) {
    for (int64_t i = 0; i < keep; i++) {
      const uint8_t *three = place + i / 2 * 3;
      const int32_t at = i % 2 ? three[1] >> 4 | three[2] << 4 : three[0] | (three[1] & 15) << 8;
      const float number = books[code[i / 4] >> 2 * (i % 4) & 3];
      if (start + at >= n) continue; /* a zero behind the last number */
      if (then == KEEP)
        errors[start + at] -= number;
      else
        values[start + at] += number;
    }
    place += keep * 3 / 2;
  }
}
