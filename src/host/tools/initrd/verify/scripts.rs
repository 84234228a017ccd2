//! Scripts, and the programs that they name as their interpreters.

use super::finding::*;
use super::programs::{self, Programs};
use crate::host::tools::initrd::newc::Kind;
use crate::host::tools::initrd::text::escaped;
use crate::host::tools::initrd::tree::{Id, Tree};

/// Scripts whose interpreters are scripts: with more the kernel says ELOOP (fs/exec.c,
/// exec_binprm).
const MAX_INTERPRETERS: usize = 5;

/// What keeps a script from being started: each interpreter on the way to a program must be there,
/// executable, and in the end an ELF file. Faults of a script: of its last interpreter, or the
/// interpreter that is not there.
pub fn script(tree: &Tree, programs: &mut Programs, path: &str, mut id: Id) -> Vec<Finding> {
    let broken = |value: String| vec![Finding::new(&LOADER_MISSING, path).value(value)];
    for _ in 0..MAX_INTERPRETERS {
        let Some(interpreter) = tree.content(id).and_then(programs::script) else {
            return broken(format!("{} is neither an ELF file nor a script", escaped(&tree.path(id))));
        };
        let Some(next) = tree.find(&interpreter).filter(|next| tree.kind(*next) == Kind::File) else { return broken(interpreter) };
        if tree.meta(next).mode & 0o111 == 0 {
            return broken(format!("{interpreter} is not executable"));
        }
        if programs.executable(next).is_some() {
            return programs.faults(next);
        }
        id = next;
    }
    broken(format!("more than {MAX_INTERPRETERS} scripts that name each other"))
}
