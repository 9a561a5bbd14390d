// A step of SGD with momentum on many tensors, which clips their gradients on the way.

constexpr int THREADS = 256, EACH = 8, CHUNK = THREADS * EACH;  // numbers of a thread and of a block
constexpr int MOST = 120;                                       // tensors of a launch

struct Tensors {
  float *values[MOST];
  const float *gradients[MOST];
  float *momenta[MOST];
  int size[MOST];
  int first[MOST];  // the first block of each
};

extern "C" __global__ void __launch_bounds__(THREADS)
    sgd(const __grid_constant__ Tensors tensors, int num, const float *rate, float limit, float decay, float momentum) {
  int low = 0;
  for (int high = num; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (tensors.first[middle] <= int(blockIdx.x)) low = middle;
    else high = middle;
  }
  float *const values = tensors.values[low], *const momenta = tensors.momenta[low];
  const float *const gradients = tensors.gradients[low];
  const int start = (blockIdx.x - tensors.first[low]) * CHUNK + threadIdx.x, size = tensors.size[low];
  float value[EACH], gradient[EACH], moved[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {  // all are read before any is used
    const int place = start + i * THREADS;
    if (place < size) value[i] = values[place], gradient[i] = gradients[place], moved[i] = momenta[place];
  }
  const float by = -*rate;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int place = start + i * THREADS;
    if (place >= size) continue;
    float g = gradient[i];
    g = g < -limit ? -limit : g > limit ? limit : g;  // what is not a number stays so
    if (decay != 0.f) g = fmaf(decay, value[i], g);
    moved[i] = fmaf(momentum, moved[i], g);
    momenta[place] = moved[i];
    values[place] = fmaf(by, moved[i], value[i]);
  }
}
