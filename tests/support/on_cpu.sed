# Makes a copy of an example with kernels that a C++ compiler accepts: train_mlp_cuda.cu includes it.
s|^#include "\.\./|#include "|
s/TRAIN = 60000, TEST = 10000/TRAIN = 512, TEST = 256/
s/([a-z_]+)<<<([^;]*)>>>\(/LAUNCH(\1, (\2), /
/^\/\/== kernels/,/^\/\/== model/ {
    /__global__/,/\{$/ s/(const )?(float|uint8_t) \*/kernel_pointer<\1\2> /g
}
