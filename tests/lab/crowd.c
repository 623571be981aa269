/* crowd COUNT: that many processes of the caller, which do nothing until the first one ends. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv) {
  int count = argc > 1 ? atoi(argv[1]) : 0;
  for (int made = 0; made < count; made++) {
    pid_t pid = fork();
    if (pid < 0) {
      perror("fork");
      return 1;
    }
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      pause();
      _exit(0);
    }
  }
  puts("all are there");
  fflush(stdout);
  pause();
  return 0;
}
