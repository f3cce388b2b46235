/*  implementation.c - the bodies of ddp.h and ddp_fsdp.h, compiled once per flavour for the tests that need none of its private names. */
#define DDP_IMPLEMENTATION
#include "ddp_fsdp.h"
