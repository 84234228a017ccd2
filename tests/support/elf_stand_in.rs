//! Minimal ELF files: the smallest that loaders and `ldconfig` accept as shared libraries.

// Numbers of elf.h.
const DT_NEEDED: u64 = 1;
const DT_SONAME: u64 = 14;
const DT_RUNPATH: u64 = 29;
const DT_STRTAB: u64 = 5;
const DT_NULL: u64 = 0;
const ET_DYN: u16 = 3;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;

/// A 64-bit x86 library with this SONAME, and these needed libraries.
pub fn library(soname: Option<&str>, needed: &[&str]) -> Vec<u8> {
    object(soname, needed, None, None)
}

/// A 64-bit x86 program with this loader, these needed libraries and this run path.
pub fn program(interpreter: &str, needed: &[&str], run_path: Option<&str>) -> Vec<u8> {
    object(None, needed, run_path, Some(interpreter))
}

/// A 64-bit file with a `.modinfo` section.
pub fn module(modinfo: &[u8]) -> Vec<u8> {
    let names = b"\0.shstrtab\0.modinfo\0";
    let (names_at, info_at) = (64_u64, 64 + names.len() as u64);
    let table_at = info_at + modinfo.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(64, 0);
    file[0x28..0x30].copy_from_slice(&table_at.to_le_bytes());
    file[0x3a..0x40].copy_from_slice(&[64, 0, 3, 0, 1, 0]);
    file.extend_from_slice(names);
    file.extend_from_slice(modinfo);
    for (name, offset, size) in [
        (0_u32, 0, 0),
        (1, names_at, names.len() as u64),
        (11, info_at, modinfo.len() as u64),
    ] {
        let mut header = [0_u8; 64];
        header[..4].copy_from_slice(&name.to_le_bytes());
        header[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
        header[0x20..0x28].copy_from_slice(&size.to_le_bytes());
        file.extend_from_slice(&header);
    }
    file
}

fn object(
    soname: Option<&str>,
    needed: &[&str],
    run_path: Option<&str>,
    interpreter: Option<&str>,
) -> Vec<u8> {
    let mut strings = vec![0_u8];
    let mut entries: Vec<(u64, u64)> = Vec::new();
    let mut text = |tag: u64, name: &str| {
        entries.push((tag, strings.len() as u64));
        strings.extend_from_slice(name.as_bytes());
        strings.push(0);
    };
    needed.iter().for_each(|name| text(DT_NEEDED, name));
    soname.iter().for_each(|name| text(DT_SONAME, name));
    run_path.iter().for_each(|path| text(DT_RUNPATH, path));
    let segments = 2 + interpreter.iter().len();
    let dynamic_at = 64 + 56 * segments as u64;
    let strings_at = dynamic_at + 16 * (entries.len() as u64 + 3);
    entries.extend([
        (DT_STRTAB, strings_at),
        (10, strings.len() as u64),
        (DT_NULL, 0),
    ]);
    let length = strings_at + strings.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([ET_DYN, 62].iter().flat_map(|v| v.to_le_bytes()));
    file.extend(1_u32.to_le_bytes());
    file.extend([0_u64, 64, 0].iter().flat_map(|v| v.to_le_bytes()));
    file.extend(0_u32.to_le_bytes());
    file.extend(
        [64_u16, 56, segments as u16, 64, 0, 0]
            .iter()
            .flat_map(|v| v.to_le_bytes()),
    );
    let mut segment = |kind: u32, offset: u64, size: u64| {
        file.extend([kind, 6].iter().flat_map(|v| v.to_le_bytes()));
        file.extend(
            [offset, offset, offset, size, size, 8]
                .iter()
                .flat_map(|v| v.to_le_bytes()),
        );
    };
    segment(PT_LOAD, 0, length);
    segment(PT_DYNAMIC, dynamic_at, 16 * entries.len() as u64);
    interpreter
        .iter()
        .for_each(|name| segment(PT_INTERP, length, name.len() as u64 + 1));
    file.extend(
        entries
            .iter()
            .flat_map(|(tag, value)| [tag.to_le_bytes(), value.to_le_bytes()].concat()),
    );
    file.extend(strings);
    interpreter
        .iter()
        .for_each(|name| file.extend(name.bytes().chain([0])));
    file
}
