//! Program of a throw-away container, which waits until it is killed. A host need not have a
//! program that runs without libraries, so the ELF file is generated here.

/// Load address.
const BASE: u64 = 0x40_0000;
/// Bytes of an ELF header, and of a program header.
const HEADERS: u16 = 64 + 56;

/// The ELF machine and the code of this architecture: pause(2), again and again.
#[cfg(target_arch = "x86_64")]
const MACHINE: Option<(u16, &[u8])> = Some((
    62,
    &[
        0xb8, 34, 0, 0, 0, // mov eax, 34 (pause)
        0x0f, 0x05, // syscall
        0xeb, 0xf7, // jmp to the start
    ],
));
#[cfg(not(target_arch = "x86_64"))]
const MACHINE: Option<(u16, &[u8])> = None;

/// The program, linked statically; None where there is none for this architecture.
pub fn waits() -> Option<Vec<u8>> {
    let (machine, code) = MACHINE?;
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec(); // 64 bits, little endian
    elf.resize(16, 0);
    let size = u64::from(HEADERS) + code.len() as u64;
    let mut put = |bytes: &[u8]| elf.extend_from_slice(bytes);
    put(&2_u16.to_le_bytes()); // a program at a fixed address
    put(&machine.to_le_bytes());
    put(&1_u32.to_le_bytes());
    put(&(BASE + u64::from(HEADERS)).to_le_bytes()); // its first instruction
    put(&64_u64.to_le_bytes()); // the program header comes next
    put(&0_u64.to_le_bytes()); // no sections
    put(&0_u32.to_le_bytes());
    [64_u16, 56, 1, 0, 0, 0]
        .iter()
        .for_each(|size| put(&size.to_le_bytes()));
    put(&1_u32.to_le_bytes()); // one segment to load: all of the file,
    put(&5_u32.to_le_bytes()); // to be read and run
    [0, BASE, BASE, size, size, 0x1000]
        .iter()
        .for_each(|value: &u64| put(&value.to_le_bytes()));
    put(code);
    Some(elf)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn it_waits_until_it_is_killed() {
        let dir = temp_dir();
        let path = dir.path().join("program");
        std::fs::write(&path, waits().unwrap()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut child = Command::new(&path).spawn().unwrap();
        // The program itself calls pause(2): one segment and no interpreter load no library.
        let syscall = format!("/proc/{}/syscall", child.id());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !std::fs::read_to_string(&syscall).is_ok_and(|text| text.starts_with("34 ")) {
            assert!(
                std::time::Instant::now() < deadline,
                "{:?} {:?}",
                child.try_wait(),
                std::fs::read_to_string(&syscall)
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
}
