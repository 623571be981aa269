/* For LD_PRELOAD: a directory of users (LDAP) whose server does not answer. */
#include <pwd.h>
#include <unistd.h>

int getpwuid_r(uid_t uid, struct passwd *entry, char *buffer, size_t size, struct passwd **result) {
  for (;;)
    pause();
}
