/*  npy_tool.c - reads a .npy file and writes it again, for npy_numpy.py.

    npy_tool IN OUT [bf16]      prints the tensor, or the error in IN */
#define DDP_TENSOR_IMPLEMENTATION
#include "../../ddp_tensor.h"
#include "../../examples/extras/npy.h"
#include "../support/watchdog.h"

int main(int argc, char **argv) {
    ddp_tensor t = DDP_ZERO;
    char text[2048];
    size_t room = sizeof text;
    if (argc != 3 && argc != 4) return fprintf(stderr, "usage: %s IN OUT [bf16]\n", argv[0]), 2;
    watchdog_start(60);
    if (argc == 4) t.dtype = DDP_BF16;
    if (npy_load(NULL, argv[1], &t) || ddp_tensor_print(NULL, &t, DDP_REPLICATE, text, &room)
        || npy_save(NULL, &t, argv[2])) {
        puts(ddp_last_error());
        return 1;
    }
    fputs(text, stdout);
    ddp_tensor_free(NULL, &t);
    return 0;
}
