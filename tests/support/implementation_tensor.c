/*  implementation_tensor.c - the bodies of ddp_tensor.h, the counterpart of implementation.c. */
#define DDP_TENSOR_IMPLEMENTATION
#include "../../ddp_tensor.h"
