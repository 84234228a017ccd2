//! System calls of the test programs for which neither std nor nix has a safe form, beside those of
//! `kata_gpu_init::machine::sys`. No other module of this package is unsafe.
#![allow(unsafe_code, reason = "system calls without a safe form in std or nix")]

use nix::errno::Errno;
use std::fs::File;
use std::os::fd::AsRawFd;

/// Makes standard input the controlling terminal of this session; another session loses it.
pub fn take_terminal() -> nix::Result<()> {
    const STEAL: nix::libc::c_int = 1;
    // SAFETY: TIOCSCTTY takes a plain number, and reads or writes no memory of this process.
    Errno::result(unsafe { nix::libc::ioctl(0, nix::libc::TIOCSCTTY as _, STEAL) }).map(drop)
}

/// Sets PATH of this process, which has started no other thread yet; refused with EDEADLK where it
/// has.
pub fn set_path_single_threaded(path: &str) -> nix::Result<()> {
    let tasks = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if tasks != 1 {
        return Err(Errno::EDEADLK);
    }
    // SAFETY: there is no other thread that could read the environment meanwhile.
    unsafe { std::env::set_var("PATH", path) };
    Ok(())
}

/// Reads where no memory is: this process dies of SIGSEGV, as the kernel does it without a handler.
pub fn fault() -> ! {
    // SAFETY: the default action needs no handler; whatever handler there was is not called.
    let reset = unsafe {
        nix::sys::signal::signal(
            nix::sys::signal::Signal::SIGSEGV,
            nix::sys::signal::SigHandler::SigDfl,
        )
    };
    reset.expect("reset SIGSEGV");
    let nowhere = std::hint::black_box(std::ptr::without_provenance::<u8>(1));
    // SAFETY: not sound as a read, and meant so: page 0 is not mapped, and the kernel ends the
    // process here.
    let _unused = unsafe { nowhere.read_volatile() };
    std::process::abort()
}

/// Pages of a file that are in the page cache, and all its pages.
pub fn resident(file: &File) -> std::io::Result<(usize, usize)> {
    const PAGE: usize = 4096;
    let length = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
    let mut pages = vec![0_u8; length.div_ceil(PAGE)];
    // SAFETY: a mapping at a place of the kernel's choice covers no memory of this process.
    let at = unsafe {
        nix::libc::mmap(
            std::ptr::null_mut(),
            length,
            nix::libc::PROT_READ,
            nix::libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if at == nix::libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the mapping has this length, and the vector a byte for each of its pages; the mapping
    // is not used, neither before nor after its end.
    let seen = unsafe {
        let seen = Errno::result(nix::libc::mincore(at, length, pages.as_mut_ptr()));
        nix::libc::munmap(at, length);
        seen
    };
    seen?;
    Ok((
        pages.iter().filter(|page| **page & 1 != 0).count(),
        pages.len(),
    ))
}
