/*  random.h - reproducible random numbers (Marsaglia's xorshift, multiplied). */
#ifndef RANDOM_H
#define RANDOM_H

#include <stdint.h>

static uint64_t random_state = 88172645463325252u;

static uint64_t random_u64(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * UINT64_C(0x9e3779b97f4a7c15);
}

#endif
