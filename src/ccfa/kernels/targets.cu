// The old class that a head which compares directions takes for the likeliest, without the row's own classes.

constexpr int THREADS = 256, LANES = 8;  // of a block, and those that share a proxy

__device__ __forceinline__ float over_lanes(float value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// A block has one row, with `num_labels` labels. `similarities` is (classes * proxies) numbers of shared memory, after
// the row itself.
extern "C" __global__ void __launch_bounds__(THREADS)
    most_confident(const float *features, const long long *labels, const float *__restrict__ proxies, const float *scale,
                   int num_labels, int num_classes, int num_proxies, int dim, float slope, float shift,
                   long long *classes, unsigned char *valid) {
  extern __shared__ __align__(16) float row[];
  float *similarities = row + dim;
  __shared__ float best[THREADS / 32];
  __shared__ int places[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float squares = 0.f;  // each warp computes them all, in the same order
  for (int i = lane; i < dim; i += 32) {
    const float value = features[blockIdx.x * dim + i];
    squares += value * value;
    if (warp == 0) row[i] = value;
  }
  const float length = fmaxf(sqrtf(over_lanes(squares)), 1e-12f);
  __syncthreads();
  const int all_proxies = num_classes * num_proxies;
#pragma unroll 4
  for (int first = threadIdx.x / 32 * (32 / LANES); first < all_proxies; first += THREADS / LANES) {
    const int proxy = first + lane / LANES;
    float product = 0.f, norm = 0.f;
    for (int i = lane % LANES * 4; i < dim && proxy < all_proxies; i += 4 * LANES) {
      const float4 part = *reinterpret_cast<const float4 *>(proxies + proxy * dim + i);
      const float4 own = *reinterpret_cast<const float4 *>(row + i);
      product += part.x * own.x + part.y * own.y + part.z * own.z + part.w * own.w;
      norm += part.x * part.x + part.y * part.y + part.z * part.z + part.w * part.w;
    }
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2) {
      product += __shfl_xor_sync(~0u, product, distance);
      norm += __shfl_xor_sync(~0u, norm, distance);
    }
    if (lane % LANES == 0 && proxy < all_proxies)
      similarities[proxy] = slope * (product / length / fmaxf(sqrtf(norm), 1e-12f)) + shift;
  }
  __syncthreads();
  float highest = -1e30f;
  int place = num_classes;
  for (int c = threadIdx.x; c < num_classes; c += THREADS) {
    float total = 0.f, weighted = 0.f;
    for (int i = 0; i < num_proxies; i++) {
      const float s = similarities[c * num_proxies + i], power = expf(s);  // s is from -4 to 1
      total += power;
      weighted += power * s;
    }
    bool is_own = false;
    for (int i = 0; i < num_labels; i++) is_own |= labels[blockIdx.x * num_labels + i] == c;
    const float logit = is_own ? -1e29f : *scale * (weighted / total);
    if (logit > highest) highest = logit, place = c;
  }
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const float other = __shfl_xor_sync(~0u, highest, distance);
    const int where = __shfl_xor_sync(~0u, place, distance);
    if (other > highest || (other == highest && where < place)) highest = other, place = where;
  }
  if (lane == 0) best[warp] = highest, places[warp] = place;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < THREADS / 32; i++)
      if (best[i] > highest || (best[i] == highest && places[i] < place)) highest = best[i], place = places[i];
    classes[blockIdx.x] = place;
    valid[blockIdx.x] = highest > -1e29f;
  }
}
