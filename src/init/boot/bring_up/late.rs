//! Kernel stacks for a GPU that takes long, for the reports that the [`schedule`](super::schedule)
//! orders.

use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

/// The driver's kernel threads that initialise adapters, as the kernel shows their names.
const OPEN_THREAD: &str = "nv_open_q";
/// Frames of a stack that are reported.
const FRAMES: usize = 8;

/// Id of this init's thread that is in the kernel for a GPU; 0: none.
#[derive(Default)]
pub struct Progress(AtomicI32);

impl Progress {
    /// Notes that the calling thread waits for this GPU.
    pub fn on_this_thread(&self) {
        self.on_thread(nix::unistd::gettid());
    }

    /// Notes the thread, of any process, that waits for this GPU.
    pub fn on_thread(&self, thread: nix::unistd::Pid) {
        self.0.store(thread.as_raw(), Ordering::Relaxed);
    }

    /// Kernel stacks of the threads that work for this GPU now; empty where the kernel does not
    /// show them. Reads other processes' files: call on a thread of its own.
    pub fn stack(&self) -> String {
        stack(Path::new("/proc"), self.0.load(Ordering::Relaxed))
    }
}

/// Stack of `thread`, and stacks of the driver's threads that are initialising. Empty where the
/// kernel does not show them.
fn stack(proc: &Path, thread: i32) -> String {
    let mut stacks = Vec::new();
    if thread != 0
        && let Ok(text) = std::fs::read_to_string(proc.join(format!("{thread}/stack")))
    {
        stacks.extend(frames(&text));
    }
    for entry in crate::machine::files::entries(proc) {
        let process = entry.path();
        if is_open_thread(&process)
            && let Some(frames) = std::fs::read_to_string(process.join("stack"))
                .ok()
                .as_deref()
                .and_then(frames)
        {
            // A thread that waits for work initialises nothing.
            if !is_idle(&frames) {
                stacks.push(format!("{OPEN_THREAD}: {frames}"));
            }
        }
    }
    stacks.join("; ")
}

/// Whether a process (its directory in /proc) is one of the driver's threads. A program may have
/// the same name: only the kernel makes kernel threads.
pub fn is_open_thread(process: &Path) -> bool {
    let read = |file: &str| std::fs::read_to_string(process.join(file)).unwrap_or_default();
    read("comm").starts_with(OPEN_THREAD) && is_kernel_thread(&read("stat"))
}

/// Whether this is the `stat` of a kernel thread: PF_KTHREAD in its flags, the seventh field after
/// the name.
fn is_kernel_thread(stat: &str) -> bool {
    const PF_KTHREAD: u64 = 0x0020_0000;
    // A name may have brackets and spaces in it.
    let flags = stat
        .rsplit_once(')')
        .and_then(|(_, fields)| fields.split_ascii_whitespace().nth(6)?.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & PF_KTHREAD != 0)
}

/// Whether a kernel thread is in its own loop and nowhere else.
fn is_idle(frames: &str) -> bool {
    const LOOP: &[&str] = &[
        "_main_loop",
        "kthread_worker_fn",
        "kthread",
        "ret_from_fork",
        "ret_from_fork_asm",
    ];
    frames.split(" < ").all(|frame| LOOP.contains(&frame))
}

/// The functions of a stack, innermost first. None for a text without any.
fn frames(text: &str) -> Option<String> {
    let names: Vec<&str> = text
        .lines()
        // "[<0>] nv_open_gpu+0x12/0x340 [nvidia]"
        .filter_map(|line| line.split_whitespace().nth(1))
        .map(|frame| frame.split('+').next().unwrap_or(frame))
        .take(FRAMES)
        .collect();
    (!names.is_empty()).then(|| names.join(" < "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn a_program_with_the_name_of_a_kernel_thread_is_none() {
        // Lines in the kernel's form: `kthreadd`'s, and those of programs that have renamed
        // themselves.
        assert!(is_kernel_thread(
            "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0"
        ));
        assert!(!is_kernel_thread(
            "77 (nv_open_q) x) S 1 77 77 0 -1 4194304 0 0 0 0"
        ));
        assert!(!is_kernel_thread(
            "77 (a) S 1 2 3 4 5 2129984) S 1 77 77 0 -1 4194304 0"
        ));
        assert!(!is_kernel_thread(""));
        let folder = temp_dir();
        let process = folder.path();
        for (flags, is) in [("4194304", false), ("2129984", true)] {
            std::fs::write(process.join("comm"), "nv_open_q\n").unwrap();
            std::fs::write(
                process.join("stat"),
                format!("9 (nv_open_q) S 2 0 0 0 -1 {flags} 0"),
            )
            .unwrap();
            assert_eq!(is_open_thread(process), is);
        }
    }

    #[test]
    fn a_stack_is_its_functions_innermost_first() {
        let text = "[<0>] msleep+0x29/0x40\n[<0>] nv_probe+0xf1/0x260 [nvidia]\n[<0>] \
            local_pci_probe+0x3e/0x80\n";
        assert_eq!(
            frames(text).as_deref(),
            Some("msleep < nv_probe < local_pci_probe")
        );
        assert_eq!(frames(""), None);
        assert!(
            is_idle("_main_loop < kthread < ret_from_fork")
                && !is_idle("msleep < nv_open_work < kthread_worker_fn < kthread")
        );
        assert_eq!(
            frames(&text.repeat(9)).map(|f| f.matches(" < ").count()),
            Some(FRAMES - 1)
        );
    }
}
