//! Scripts, and the programs that they name as their interpreters.

use super::image_rules::*;
use super::programs::{self, Programs};
use crate::images::entry_text::escaped;
use crate::images::newc::Kind;
use crate::images::unpacked_root::{Id, Tree};

/// Limit of scripts that interpret scripts: for more, the kernel returns ELOOP (fs/exec.c,
/// exec_binprm).
const MAX_INTERPRETERS: usize = 5;

/// Reasons why a script cannot start: every interpreter must exist and be executable, and the last
/// one must be an ELF file. Faults are those of the last interpreter, or name the missing one.
pub fn script(tree: &Tree, programs: &mut Programs, path: &str, mut id: Id) -> Vec<Finding> {
    let broken = |value: String| vec![Finding::new(&LOADER_MISSING, path).value(value)];
    for _ in 0..MAX_INTERPRETERS {
        let Some(interpreter) = tree.content(id).and_then(programs::script) else {
            return broken(format!(
                "{} is neither an ELF file nor a script",
                escaped(&tree.path(id))
            ));
        };
        let Some(next) = tree
            .find(&interpreter)
            .filter(|next| tree.kind(*next) == Kind::File)
        else {
            return broken(interpreter);
        };
        if tree.meta(next).mode & 0o111 == 0 {
            return broken(format!("{interpreter} is not executable"));
        }
        if programs.executable(next).is_some() {
            return programs.faults(next);
        }
        id = next;
    }
    broken(format!(
        "more than {MAX_INTERPRETERS} scripts that name each other"
    ))
}
