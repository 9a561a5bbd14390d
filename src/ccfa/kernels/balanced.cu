// Balanced targets: the assignment that `solve` in augmentation/targets.py finds, by the same iteration, in one block.
//
// A thread has a row of confidences with its candidates, and each class a place in shared memory. Sums over rows are
// added up as whole numbers, so that no result depends on the order in which warps run.
//
// Macro: PLACES (candidates of a row).

constexpr float STEPS = 1048576.f;  // parts of a row: five hundred rows of one class do not overflow

// The nearest point with numbers >= 0 that sum to 1.
__device__ __forceinline__ void onto_simplex(float (&row)[PLACES]) {
  float sorted[PLACES];
#pragma unroll
  for (int k = 0; k < PLACES; k++) sorted[k] = row[k];
#pragma unroll
  for (int round = 0; round < PLACES; round++)
#pragma unroll
    for (int k = round % 2; k + 1 < PLACES; k += 2) {
      const float one = sorted[k], other = sorted[k + 1];
      sorted[k] = fmaxf(one, other), sorted[k + 1] = fminf(one, other);
    }
  float sum = -1.f, threshold = sorted[0] - 1.f;
#pragma unroll
  for (int k = 0; k < PLACES; k++) {
    sum += sorted[k];
    threshold = fmaxf(threshold, sum * (1.f / (k + 1)));
  }
#pragma unroll
  for (int k = 0; k < PLACES; k++) row[k] = fmaxf(row[k] - threshold, 0.f);
}

__device__ __forceinline__ float between(float from, float to, float part) { return from + part * (to - from); }

// Places without a class have the index `num_old`. `share` is the number of rows that are meant for each class.
extern "C" __global__ void __launch_bounds__(512)
    balance(const float *__restrict__ confidences, const long long *__restrict__ classes, const float *share,
            float *__restrict__ result, int num_rows, int num_old, int iterations, int restart, float price_weight) {
  extern __shared__ __align__(16) float shared[];
  const int size = num_old + 1, row = threadIdx.x;
  float *const prices = shared, *const excess = prices + size, *const price_steps = excess + size;
  float *const price_anchors = price_steps + size, *const excess_anchors = price_anchors + size;
  int *const sums = reinterpret_cast<int *>(excess_anchors + size);

  float gains[PLACES], assigned[PLACES], anchors[PLACES];
  int own[PLACES];
  float highest = -3e38f;
#pragma unroll
  for (int k = 0; k < PLACES; k++) {
    own[k] = row < num_rows ? int(classes[row * PLACES + k]) : num_old;
    gains[k] = row < num_rows ? confidences[row * PLACES + k] : 0.f;
    highest = fmaxf(highest, gains[k]);
    assigned[k] = anchors[k] = 1.f / PLACES;
  }
#pragma unroll
  for (int k = 0; k < PLACES; k++) gains[k] = (gains[k] - highest) / price_weight;

  for (int c = row; c < size; c += blockDim.x) sums[c] = 0;
  __syncthreads();
  if (row < num_rows)
#pragma unroll
    for (int k = 0; k < PLACES; k++) atomicAdd(sums + own[k], 1);
  __syncthreads();
  const float wanted = *share;
  for (int c = row; c < size; c += blockDim.x) {
    price_steps[c] = price_weight / max(sums[c], 1);
    excess[c] = excess_anchors[c] = sums[c] * (1.f / PLACES) - wanted;
    prices[c] = price_anchors[c] = 0.f;
    sums[c] = 0;
  }
  __syncthreads();

  for (int iteration = 0; iteration < iterations; iteration++) {
    const int since = iteration % restart;
    const bool restarts = since == restart - 1 || iteration == iterations - 1;
    const float inward = (since + 1.f) / (since + 2.f);  // how far from the anchor
    float next[PLACES];
#pragma unroll
    for (int k = 0; k < PLACES; k++) next[k] = assigned[k] + gains[k] - prices[own[k]] / price_weight;
    onto_simplex(next);
    if (row < num_rows)
#pragma unroll
      for (int k = 0; k < PLACES; k++)
        if (next[k] > 0.f) atomicAdd(sums + own[k], __float2int_rn(next[k] * STEPS));
#pragma unroll
    for (int k = 0; k < PLACES; k++) {
      const float reflected = 2.f * next[k] - assigned[k];
      assigned[k] = restarts ? next[k] : between(anchors[k], reflected, inward);
      if (restarts) anchors[k] = next[k];
    }
    __syncthreads();
    for (int c = row; c < size; c += blockDim.x) {
      const float next_excess = sums[c] / STEPS - wanted, reflected = 2.f * next_excess - excess[c];
      const float next_price = fminf(fmaxf(prices[c] + price_steps[c] * reflected, -1.f), 1.f);
      excess[c] = restarts ? next_excess : between(excess_anchors[c], reflected, inward);
      prices[c] = restarts ? next_price : between(price_anchors[c], 2.f * next_price - prices[c], inward);
      if (restarts) excess_anchors[c] = next_excess, price_anchors[c] = next_price;
      sums[c] = 0;
    }
    __syncthreads();
  }
  if (row < num_rows)
#pragma unroll
    for (int k = 0; k < PLACES; k++) result[row * PLACES + k] = assigned[k];
}
