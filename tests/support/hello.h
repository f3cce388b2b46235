/*  hello.h - lets a test know when rank 0 has read the hello of a rank that joins by its environment.

    Include before ddp.h, whose only send() is that hello. Set hello_is_read in the process of the rank. */
#ifndef DDP_TEST_HELLO_H
#define DDP_TEST_HELLO_H

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static void (*hello_is_read)(void); /* NULL: nobody asks */

static ssize_t hello_send(int fd, const void *data, size_t size, int flags) {
    ssize_t sent = send(fd, data, size, flags);
    int unread = 1;
    if (!hello_is_read) return sent;
    while (ioctl(fd, SIOCOUTQ, &unread) == 0 && unread > 0) usleep(500);
    hello_is_read();
    return sent;
}
#define send(fd, data, size, flags) hello_send(fd, data, size, flags)

#endif /* DDP_TEST_HELLO_H */
