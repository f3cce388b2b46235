/*  before_syscall.h - observes the system calls that ddp.h makes with syscall().

    The source defines before_syscall and includes this file. It defines syscall as watched_syscall around
    ddp.h, and undefines it afterwards. */
#ifndef DDP_TEST_BEFORE_SYSCALL_H
#define DDP_TEST_BEFORE_SYSCALL_H

#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

static void before_syscall(long number, const long argument[6]);

static long watched_syscall(long number, ...) {
    long argument[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) argument[i] = va_arg(list, long);
    va_end(list);
    before_syscall(number, argument);
    return syscall(number, argument[0], argument[1], argument[2], argument[3], argument[4], argument[5]);
}

#endif
