// Functions of rows (num, dim) of float32, a warp a row.

constexpr int WARPS = 4;

__device__ __forceinline__ float over_lanes(float value) {  // the sum, the same bits in all lanes
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

__device__ __forceinline__ float dot(const float *a, const float *b, int dim) {
  float sum = 0.f;
  for (int i = threadIdx.x % 32; i < dim; i += 32) sum += a[i] * b[i];
  return over_lanes(sum);
}

// unit = x / max(|x|, 1e-12), and that length, with a minus where it is the limit.
extern "C" __global__ void normalise(const float *x, int num, int dim, float *unit, float *lengths) {
  const int row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= num) return;
  x += row * dim, unit += row * dim;
  const float length = sqrtf(dot(x, x, dim)), limited = fmaxf(length, 1e-12f);
  for (int i = threadIdx.x % 32; i < dim; i += 32) unit[i] = x[i] / limited;
  if (threadIdx.x % 32 == 0) lengths[row] = length > 1e-12f ? length : -limited;
}

extern "C" __global__ void normalise_gradient(const float *gradient, const float *unit, const float *lengths, int num,
                                              int dim, float *result) {
  const int row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= num) return;
  gradient += row * dim, unit += row * dim, result += row * dim;
  const float along = lengths[row] > 0.f ? dot(gradient, unit, dim) : 0.f, length = fabsf(lengths[row]);
  for (int i = threadIdx.x % 32; i < dim; i += 32) result[i] = (gradient[i] - along * unit[i]) / length;
}

// 1 - cos of each row with that of the previous network, and the gradient of their mean.
extern "C" __global__ void cosine_distance(const float *previous, const float *current, int num, int dim,
                                           float *distances, float *result) {
  const int row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= num) return;
  previous += row * dim, current += row * dim, result += row * dim;
  const float old_length = fmaxf(sqrtf(dot(previous, previous, dim)), 1e-8f);
  const float length = sqrtf(dot(current, current, dim)), limited = fmaxf(length, 1e-8f);
  const float cosine = dot(previous, current, dim) / old_length / limited;
  const float along = length > 1e-8f ? cosine / limited : 0.f;
  for (int i = threadIdx.x % 32; i < dim; i += 32)
    result[i] = (along * current[i] - previous[i] / old_length) / limited / num;
  if (threadIdx.x % 32 == 0) distances[row] = 1.f - cosine;
}
