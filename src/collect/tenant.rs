//! Tenant of a boot, for the share of the disk that its boots take.
//!
//! One VM is no tenant: a pod that is made again is another VM. The namespace counts where the
//! runtime's files name it; else the user of the VMM, which the kernel vouches for; all other boots
//! are one tenant's.

use super::boot_log::open;
use kata_gpu_report::data::boot_dir;
use kata_gpu_report::data::boot_file::{FileLine, HostEvent, Sandbox, decode};
use kata_gpu_report::data::compact_record::Names;
use kata_gpu_report::data::framing::{Lines, Piece};
use kata_gpu_wire::record::MAX_LINE;
use std::collections::{HashMap, HashSet};
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

/// Most bytes of a file that are looked through for a name that came late: twice what a boot may
/// have.
const MOST: u64 = 128 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Tenant {
    Namespace(Arc<str>),
    /// User of the VMM.
    User(u32),
    Nameless,
}

impl From<Sandbox> for Tenant {
    fn from(sandbox: Sandbox) -> Self {
        match (sandbox.namespace, sandbox.vmm_user) {
            (Some(namespace), _) => Tenant::Namespace(namespace.into()),
            (None, Some(user)) => Tenant::User(user),
            (None, None) => Tenant::Nameless,
        }
    }
}

/// Tenants of the boots that were looked at, with the bytes that each boot had.
#[derive(Debug, Default)]
pub struct Tenants(HashMap<String, (u64, Option<Tenant>)>);

impl Tenants {
    /// Tenant of a boot of so many bytes; None for a file that no connection made. A file without a
    /// namespace is read again when it has grown: some runtimes name a VM long after its start.
    pub fn of(&mut self, boot_id: &str, path: &Path, bytes: u64) -> Option<Tenant> {
        match self.0.get(boot_id) {
            Some((_, Some(tenant @ Tenant::Namespace(_)))) => return Some(tenant.clone()),
            Some((before, tenant)) if *before == bytes => return tenant.clone(),
            _ => {}
        }
        let tenant = read(path).ok().flatten();
        let known = (bytes, tenant.clone());
        self.0.insert(boot_id.to_string(), known);
        tenant
    }

    pub fn forget_all_but<'a>(&mut self, there: impl Iterator<Item = &'a str>) {
        let there: HashSet<&str> = there.collect();
        self.0.retain(|boot_id, _| there.contains(&**boot_id));
    }
}

fn read(path: &Path) -> io::Result<Option<Tenant>> {
    let file = open(path, OpenOptions::new().read(true))?;
    let (mut found, mut names) = (None, Names::default());
    let mut lines = Lines::new(MAX_LINE);
    for bytes in [boot_dir::HEAD, MOST] {
        lines.read((&file).take(bytes), |piece| {
            if let Piece::Line(line) = piece
                && is_host_line(line)
                && let Ok(FileLine::Host(line)) = decode(line, &mut names)
            {
                match line.event {
                    HostEvent::Connected { .. } => found = found.take().or(Some(Tenant::Nameless)),
                    HostEvent::Sandbox(sandbox) => found = Some(sandbox.into()),
                    _ => {}
                }
            }
        })?;
        if matches!(found, Some(Tenant::Namespace(_))) {
            break;
        }
    }
    Ok(found)
}

/// Whether a line begins as the collector's own do. Decoding all lines of guests would take long.
fn is_host_line(line: &[u8]) -> bool {
    let rest = line.strip_prefix(br#"{"schema":"#).map(|rest| {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        rest.split_at(digits).1
    });
    rest.is_some_and(|rest| rest.starts_with(br#","kind":"host""#))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_report::data::boot_file::HostLine;
    use kata_gpu_test_support::{BOOT, event_line, header, temp_dir};
    use kata_gpu_wire::record::header_line;

    #[test]
    fn a_boots_tenant_is_found_however_late_its_name_came() {
        let dir = temp_dir();
        let path = dir.path().join("boot");
        let host = |event| HostLine::now(event).to_line();
        let connected = host(HostEvent::Connected {
            peer: "cid 5".into(),
            first_seq: 0,
        });
        let sandbox = |namespace: Option<&str>, vmm_user| {
            host(HostEvent::Sandbox(Sandbox {
                id: "0a1b".into(),
                namespace: namespace.map(str::to_string),
                vmm_user,
                ..Sandbox::default()
            }))
        };
        let mut tenants = Tenants::default();
        let mut text = String::new();
        let many = event_line(7).repeat(boot_dir::HEAD as usize / event_line(7).len() + 1);
        for (more, want) in [
            (header_line(&header(BOOT)), None),
            (connected, Some(Tenant::Nameless)),
            (sandbox(None, Some(7)), Some(Tenant::User(7))),
            (many, Some(Tenant::User(7))),
            (
                sandbox(Some("ml"), Some(7)),
                Some(Tenant::Namespace("ml".into())),
            ),
        ] {
            text += &more;
            std::fs::write(&path, &text).unwrap();
            assert_eq!(tenants.of(BOOT, &path, text.len() as u64), want);
        }
        std::fs::remove_file(&path).unwrap();
        let ml = Some(Tenant::Namespace("ml".into()));
        assert_eq!(tenants.of(BOOT, &path, 0), ml, "read once");
        tenants.forget_all_but(std::iter::empty());
        assert_eq!(tenants.of(BOOT, &path, 0), None);
    }
}
