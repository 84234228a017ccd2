//! Changing an initrd for one test: newc archives, read and written; see the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst.

use anyhow::{Context, Result, ensure};

const MAGIC: &[u8] = b"070701";
const HEADER: usize = 110;
const TRAILER: &str = "TRAILER!!!";

/// The archive with some files replaced or added, and some left out. Paths are as in the archive,
/// without a leading slash. Folders that a new file needs come with it.
pub fn change(archive: &[u8], files: &[(String, Vec<u8>)], without: &[&str]) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(archive.len());
    let mut rest = archive;
    let mut left_out = 0;
    let mut directories = std::collections::HashSet::new();
    loop {
        let field = |n: usize| -> Result<usize> {
            let digits = rest
                .get(6 + n * 8..14 + n * 8)
                .context("the archive ends inside a header")?;
            Ok(usize::from_str_radix(std::str::from_utf8(digits)?, 16)?)
        };
        ensure!(
            rest.starts_with(MAGIC),
            "not a newc archive at {} bytes from its end",
            rest.len()
        );
        let (size, name_size) = (field(6)?, field(11)?);
        let name = std::str::from_utf8(
            rest.get(HEADER..HEADER + name_size - 1)
                .context("no name")?,
        )?
        .trim_start_matches("./");
        let data_at = (HEADER + name_size).next_multiple_of(4);
        let end = (data_at + size).next_multiple_of(4);
        if name == TRAILER {
            break;
        }
        if field(1)? & 0o170_000 == 0o040_000 {
            directories.insert(name.to_string());
        }
        if without.contains(&name) {
            left_out += 1;
        } else if !files.iter().any(|(path, _)| path == name) {
            out.extend_from_slice(rest.get(..end).context("the archive ends inside a file")?);
        }
        rest = rest.get(end..).context("the archive has no end")?;
    }
    ensure!(
        left_out == without.len(),
        "not in the archive: one of {without:?}"
    );
    for (path, text) in files {
        // The kernel makes no folder on its own: it leaves out a file whose folder is not there.
        for (end, _) in path.match_indices('/') {
            if directories.insert(path[..end].to_string()) {
                add(&mut out, &path[..end], 0o040_755, b"");
            }
        }
        add(&mut out, path, 0o100_755, text);
    }
    add(&mut out, TRAILER, 0, b"");
    Ok(out)
}

fn add(out: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]) {
    out.extend_from_slice(MAGIC);
    // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
    let fields = [
        0,
        mode,
        0,
        0,
        1,
        0,
        data.len() as u32,
        0,
        0,
        0,
        0,
        name.len() as u32 + 1,
        0,
    ];
    fields
        .iter()
        .for_each(|f| out.extend_from_slice(format!("{f:08x}").as_bytes()));
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_added_and_left_out() {
        let mut base = Vec::new();
        add(&mut base, "init", 0o100_755, b"old");
        add(&mut base, "etc/list", 0o100_644, b"12345");
        add(&mut base, TRAILER, 0, b"");
        let changed = change(&base, &[("init".into(), b"new!".to_vec())], &["etc/list"]).unwrap();
        let text = String::from_utf8_lossy(&changed).into_owned();
        assert!(text.contains("new!") && !text.contains("old") && !text.contains("12345"));
        assert!(change(&base, &[], &["nosuch"]).is_err());
        assert!(change(b"garbage", &[], &[]).is_err());
    }
}
