//! Commands for `debugfs` that put init, link, helper and list into an ext4 file system. Every word
//! is a constant of this program.

use super::tool_sandbox::{HELPER, INIT, LIST};
use super::wanted::{LIST_DIRECTORIES, LIST_NAME, Wanted};
use crate::images::helper;
use crate::images::unpacked_root::Tree;
use kata_gpu_wire::nvml_messages::PROGRAM;

/// Commands, one a line. Existing files are removed first. An existing directory is not made again:
/// `mkdir` would damage the file system.
pub fn commands(tree: &Tree, wanted: &Wanted) -> String {
    let is_there = |path: &str| tree.find_no_follow(path).is_some();
    let remove = |path: &str, name: &str| {
        if is_there(path) {
            vec![format!("rm {name}")]
        } else {
            Vec::new()
        }
    };
    let own = |name: &str| {
        vec![
            format!("set_inode_field {name} uid 0"),
            format!("set_inode_field {name} gid 0"),
        ]
    };
    let mut all = vec!["cd /".to_string()];
    all.extend(remove("/init", "init"));
    all.extend([
        format!("write {INIT} init"),
        "set_inode_field init mode 0100755".into(),
    ]);
    all.extend(own("init"));
    all.push(format!("cd {}", wanted.sbin));
    all.extend(remove(&format!("{}/init", wanted.sbin), "init"));
    all.push("symlink init /init".into());
    all.extend(own("init"));
    if wanted.helper.is_some() {
        all.push(format!("cd {}", helper::DIRECTORIES[1]));
        all.extend(remove(&helper::path(), PROGRAM));
        all.extend([
            format!("write {HELPER} {PROGRAM}"),
            format!("set_inode_field {PROGRAM} mode 0100755"),
        ]);
        all.extend(own(PROGRAM));
    }
    if wanted.list.is_some() {
        all.push("cd /".into());
        for (path, name) in LIST_DIRECTORIES {
            if !is_there(path) {
                all.push(format!("mkdir {name}"));
                all.extend(own(name));
            }
            all.push(format!("cd {path}"));
        }
        all.extend(remove(&wanted.list_path(), LIST_NAME));
        all.extend([
            format!("write {LIST} {LIST_NAME}"),
            format!("set_inode_field {LIST_NAME} mode 0100644"),
        ]);
        all.extend(own(LIST_NAME));
    }
    all.push(String::new());
    all.join("\n")
}
