/*  implementation_tensor.c - the bodies of ddp_tensor.h, as implementation.c has those of ddp.h. */
#define DDP_TENSOR_IMPLEMENTATION
#include "../../ddp_tensor.h"
