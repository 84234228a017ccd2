//! Forbids, in every thread, system calls that no collector makes: those that the container
//! runtimes' default seccomp profiles forbid, starting programs, and sockets of other families.
//!
//! The default profiles forbid AF_VSOCK, too (containerd's since 1.7, CRI-O's newer ones), so that
//! a pod of the collector cannot have them. The list names forbidden calls, not allowed ones: a C
//! library that takes to a new system call must not end a service that has run for months.

use anyhow::{Context, Result};
use nix::libc::{self, c_int, c_long};
use seccompiler::SeccompAction::{Allow, Errno};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::{BpfProgram, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule};
use std::collections::BTreeMap;

/// Families of sockets that the collector has, or that its C library looks up names with.
const FAMILIES: &[c_int] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_VSOCK];

/// Forbidden whatever the arguments: other programs and processes; mounts and namespaces; the
/// kernel's own state; usual first steps of attacks on the kernel.
const FORBIDDEN: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_mount_setattr,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_mknodat,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_fanotify_init,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_personality,
];

/// Forbidden calls that only this processor architecture has.
#[cfg(target_arch = "x86_64")]
const FORBIDDEN_HERE: &[c_long] = &[
    libc::SYS_mknod,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_modify_ldt,
    libc::SYS_kexec_file_load,
    libc::SYS_uselib,
];
#[cfg(not(target_arch = "x86_64"))]
const FORBIDDEN_HERE: &[c_long] = &[];

/// Flags of clone() that make a namespace.
const NAMESPACES: &[c_int] = &[
    libc::CLONE_NEWNS,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

/// Forbids the calls to this thread and to threads that it starts, for good. Requires no_new_privs.
pub fn forbid() -> Result<()> {
    for program in [refused()?, unknown()?] {
        seccompiler::apply_filter(&program).context("forbid system calls (seccomp)")?;
    }
    Ok(())
}

/// Filter that answers EPERM.
fn refused() -> Result<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = FORBIDDEN
        .iter()
        .chain(FORBIDDEN_HERE)
        .map(|call| (*call, Vec::new()))
        .collect();
    let other = FAMILIES
        .iter()
        .map(|family| SeccompCondition::new(0, Dword, SeccompCmpOp::Ne, *family as u64));
    rules.insert(
        libc::SYS_socket,
        vec![SeccompRule::new(other.collect::<Result<_, _>>()?)?],
    );
    let namespaces = NAMESPACES.iter().map(|flag| {
        let flag = u64::from(*flag as u32);
        SeccompRule::new(vec![SeccompCondition::new(
            0,
            Qword,
            SeccompCmpOp::MaskedEq(flag),
            flag,
        )?])
    });
    rules.insert(libc::SYS_clone, namespaces.collect::<Result<_, _>>()?);
    compile(rules, libc::EPERM)
}

/// Answers ENOSYS: a filter cannot see the flags of clone3(), and C libraries then take clone().
fn unknown() -> Result<BpfProgram> {
    compile(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        libc::ENOSYS,
    )
}

/// Answers ENOSYS to one system call of this thread, for good.
#[cfg(test)]
pub fn answer_unknown(call: c_long) -> Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    seccompiler::apply_filter(&compile(
        BTreeMap::from([(call, Vec::new())]),
        libc::ENOSYS,
    )?)?;
    Ok(())
}

fn compile(mut rules: BTreeMap<i64, Vec<SeccompRule>>, errno: c_int) -> Result<BpfProgram> {
    /// Bit of the numbers of the x32 ABI, under which a kernel that has it takes the same calls.
    const X32: i64 = 0x4000_0000;
    if cfg!(target_arch = "x86_64") {
        rules.extend(
            rules
                .clone()
                .into_iter()
                .map(|(call, rules)| (call | X32, rules)),
        );
    }
    let filter = SeccompFilter::new(
        rules,
        Allow,
        Errno(errno as u32),
        std::env::consts::ARCH.try_into()?,
    )?;
    Ok(filter.try_into()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;
    use nix::sched::{CloneFlags, unshare};
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

    #[test]
    fn confined_threads_can_make_no_program_namespace_or_socket() {
        let family = |family| socket(family, SockType::Datagram, SockFlag::empty(), None).map(drop);
        let attempts = move || {
            // Not std's exec, which resets SIGPIPE to its default in every thread of the tests.
            let failed = nix::unistd::execv(c"/bin/true", &[c"/bin/true"]).err();
            let unshared = unshare(CloneFlags::CLONE_NEWUSER);
            (
                failed,
                unshared,
                family(AddressFamily::Netlink),
                family(AddressFamily::Unix),
                family(AddressFamily::Inet),
            )
        };
        // Use a new thread: other tests run in the test's own thread later.
        let thread = std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            assert_eq!(
                family(AddressFamily::Netlink),
                Ok(()),
                "this thread may before"
            );
            forbid().unwrap();
            let vsock = socket2::Socket::new(socket2::Domain::VSOCK, socket2::Type::STREAM, None)
                .err()
                .and_then(|e| e.raw_os_error());
            assert_ne!(vsock, Some(libc::EPERM), "AF_VSOCK is the collector's own");
            [attempts(), std::thread::spawn(attempts).join().unwrap()]
        });
        for result in thread.join().unwrap() {
            assert_eq!(
                result,
                (
                    Some(Errno::EPERM),
                    Err(Errno::EPERM),
                    Err(Errno::EPERM),
                    Ok(()),
                    Ok(())
                )
            );
        }
    }
}
