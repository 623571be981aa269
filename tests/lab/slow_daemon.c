/* For LD_PRELOAD: a machine so busy that what goes into the background leaves its terminal a second later. */
#include <unistd.h>

int daemon(int keeps_folder, int keeps_streams) {
  (void)keeps_folder, (void)keeps_streams;
  pid_t child = fork();
  if (child != 0) {
    if (child > 0)
      _exit(0);
    return -1;
  }
  sleep(1);
  return setsid() < 0 ? -1 : 0;
}
