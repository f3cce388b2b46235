/*  with_port.c - `with_port COMMAND ...` runs a command with a reserved port (ports.h) in DDP_TEST_PORT, for
   scripts. */
#include "ports.h"

#include <fcntl.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    char text[16];
    int port = argc > 1 ? some_ports(1) : 0;
    if (!port) return fprintf(stderr, "usage: with_port COMMAND ...\n"), 2;
    fcntl(ports_claimed_by, F_SETFD, 0); /* the command inherits the claim */
    snprintf(text, sizeof text, "%d", port);
    setenv("DDP_TEST_PORT", text, 1);
    execvp(argv[1], argv + 1);
    perror(argv[1]);
    return 127;
}
