/*  implementation.c - the bodies of ddp.h, compiled once per flavour for the tests that need none of its private names. */
#define DDP_IMPLEMENTATION
#include "ddp.h"
