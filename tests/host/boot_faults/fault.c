// Runs the program /init of a root as PID 1 of a process namespace of its own, with a fault in one
// of its system calls:
//
//   fault ROOT CALL FIRST COUNT ERRNO
//
// Of the calls with the number CALL after the start of /init, those from FIRST on, COUNT of them,
// return ERRNO and do nothing. Prints `agent` when PID 1 has become another program, and holds it
// there until standard input ends; prints `ended STATUS` when PID 1 has ended instead. The last
// word is the number of calls that failed. PID 1 lacks the capabilities with which it could change
// the machine.
#define _GNU_SOURCE
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

static void need(int done, const char *what) {
    if (!done) {
        perror(what);
        _exit(99);
    }
}

static void become_init(const char *root) {
    static const int dropped[] = {CAP_SYS_MODULE, CAP_SYS_TIME, CAP_SYS_RAWIO, CAP_MAC_ADMIN};
    need(chdir(root) == 0 && chroot(".") == 0, "chroot");
    need(mount("proc", "/proc", "proc", 0, NULL) == 0, "mount proc");
    need(mount("/proc/sys", "/proc/sys", NULL, MS_BIND, NULL) == 0, "bind /proc/sys");
    need(mount(NULL, "/proc/sys", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL) == 0, "read-only");
    need(mount("/command-line", "/proc/cmdline", NULL, MS_BIND, NULL) == 0, "bind cmdline");
    for (unsigned i = 0; i < sizeof dropped / sizeof *dropped; i++)
        need(prctl(PR_CAPBSET_DROP, dropped[i], 0, 0, 0) == 0, "drop a capability");
    need(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0, "prctl");
    need(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0, "ptrace");
    need(execl("/init", "/init", NULL) == 0, "execute /init");
}

int main(int count, char **words) {
    if (count != 6) return 98;
    long call = atol(words[2]), first = atol(words[3]), last = first + atol(words[4]) - 1;
    long error = atol(words[5]), seen = 0, failed = 0, inside = 0, fails = 0;
    int status;
    need(unshare(CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC) == 0, "unshare");
    int init = fork();
    need(init >= 0, "fork");
    if (init == 0) become_init(words[1]);
    need(waitpid(init, &status, 0) == init && WIFSTOPPED(status), "start /init");
    long options = PTRACE_O_EXITKILL | PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEEXEC;
    need(ptrace(PTRACE_SETOPTIONS, init, 0, options) == 0, "ptrace options");
    for (int signal = 0;;) {
        need(ptrace(PTRACE_SYSCALL, init, 0, (long)signal) == 0, "ptrace");
        signal = 0;
        need(waitpid(init, &status, 0) == init, "wait");
        if (!WIFSTOPPED(status)) {
            printf("ended %d %ld\n", status, failed);
            return 0;
        }
        if (status >> 8 == (SIGTRAP | PTRACE_EVENT_EXEC << 8)) break;
        if (WSTOPSIG(status) != (SIGTRAP | 0x80)) {
            signal = WSTOPSIG(status);
            continue;
        }
        struct user_regs_struct registers;
        need(ptrace(PTRACE_GETREGS, init, 0, &registers) == 0, "read registers");
        inside = !inside;
        if (inside && (long)registers.orig_rax == call) {
            fails = ++seen >= first && seen <= last;
            if (fails) registers.orig_rax = -1; // no call has this number
        } else if (!inside && fails) {
            registers.rax = -error;
            failed++;
            fails = 0;
        } else {
            continue;
        }
        need(ptrace(PTRACE_SETREGS, init, 0, &registers) == 0, "write registers");
    }
    printf("agent %ld\n", failed);
    fflush(stdout);
    char end;
    return read(0, &end, 1) < 0;
}
