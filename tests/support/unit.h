/*  unit.h - cmocka with the headers that it needs first; for C and C++. */
#ifndef DDP_TEST_UNIT_H
#define DDP_TEST_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif
#include <cmocka.h>
#ifdef __cplusplus
}
#endif

#endif /* DDP_TEST_UNIT_H */
