//! Every reason why a configuration's guests cannot start from the given initrd or image. Data in,
//! refusals out.
//!
//! A refusal names file, key, value, reason and cure. `--force` passes the refusals on which a user
//! can know better. No option passes a refusal where the runtime would fail, or where the result
//! would differ from the request.

use super::drop_in_plan::{GPU_EXTENSION, Plan, is_gpu_extension};
use super::gpu_pods;
use super::guest::{Guest, What};
use super::guest_check::Form;
use super::kernel_params;
use super::kernel_params::MAX_COMMAND_LINE;
use crate::kata::drop_in;
use crate::kata::drop_in::Found;
use crate::kata::gpu_needs::LEAST_CDI_TIMEOUT_S;
use crate::kata::kata_config::KataConfig;
use crate::kata::merge;
use crate::kata::merge::default_memory;
use crate::kata::merge::{Effective, Runtime};
use crate::kata::refusal::Refusal;
use crate::kata::version::Version;
use std::path::Path;
use toml::Value;

/// Hypervisors to which Kata attaches GPUs by VFIO and which boot an initrd. runtime-rs before 4.0
/// uses the name cloud-hypervisor.
const SUPPORTED: [&[&str]; 2] = [&["qemu", "clh"], &["qemu", "clh", "cloud-hypervisor"]];
/// Hypervisors that boot an initrd; GPUs attached to them are untested here.
const WITHOUT_GPUS: &[&str] = &["firecracker", "dragonball", "stratovirt", "openvmm"];
/// First release in which the Go runtime accepts a key in a drop-in: the Go runtime refuses a
/// configuration with an unknown key.
const GO_KEYS_SINCE: &[(&str, Version)] = &[
    ("rootfs_type", Version::new(3, 1, 0)),
    ("kernel_verity_params", Version::new(3, 27, 0)),
    ("guest_extension_images", Version::new(4, 0, 0)),
];
/// Paths of the init in an image, as kata-gpu-boot image replace-init places it.
const INITS_OF_IMAGES: [&str; 2] = ["/sbin/init", "/init"];
const MIB: u64 = 1 << 20;

/// Facts that the refusals are derived from.
pub struct Facts<'a> {
    pub config: &'a KataConfig,
    pub runtime: Runtime,
    pub version: Option<Version>,
    /// Configuration without our drop-in, and with the planned one.
    pub before: &'a Effective,
    pub after: &'a Effective,
    pub plan: &'a Plan,
    pub guest: &'a Guest,
}

/// All refusals.
pub fn check(facts: &Facts) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    refusals.extend(version(facts));
    refusals.extend(hypervisor(facts));
    refusals.extend(directory(facts));
    refusals.extend(confidential(facts));
    refusals.extend(prepared_guests(facts));
    refusals.extend(gpu_pods::refusals(facts));
    refusals.extend(kernel_command_line(facts));
    refusals.extend(size_and_mode(facts));
    refusals.extend(facts.guest.refusals());
    refusals.extend(driver(facts));
    refusals.extend(overridden(facts));
    refusals.extend(own_file(&facts.config.ours, &facts.config.drop_in_path()));
    refusals
}

impl Facts<'_> {
    fn has_text(&self, key: &str) -> bool {
        let path = ["hypervisor", &self.plan.section, key];
        self.before.text(&path).is_some()
    }

    fn is_on(&self, key: &str) -> bool {
        let path = ["hypervisor", &self.plan.section, key];
        self.before.get(&path) == Some(&Value::Boolean(true))
    }

    /// A refusal of a value that is effective without our drop-in.
    fn refuse(&self, path: &[&str], why: &str) -> Refusal {
        let file = self.before.origin(path).unwrap_or(&self.config.base.path);
        let value = self
            .before
            .get(path)
            .map(drop_in::inline)
            .unwrap_or_else(|| "absent".into());
        Refusal::at(file, why).key(&path.join("."), &value)
    }

    pub fn refuse_key(&self, key: &str, why: &str) -> Refusal {
        self.refuse(&["hypervisor", &self.plan.section, key], why)
    }
}

fn version(facts: &Facts) -> Vec<Refusal> {
    let Some(version) = facts.version else {
        return Vec::new();
    };
    let (major, minor) = facts.runtime.drop_ins_since();
    let runtime = facts.runtime.name();
    if (version.major, version.minor) < (major, minor) {
        let why = format!("the {runtime} reads drop-ins from {major}.{minor}.0 on");
        return vec![
            Refusal::at(&facts.config.base.path, why)
                .key("Kata version", &version.to_string())
                .cure("upgrade Kata"),
        ];
    }
    let unknown = |(key, since): &&(&str, Version)| {
        facts.plan.keys.iter().any(|(planned, _)| planned == key) && version < *since
    };
    let refuse = |(key, since): &(&str, Version)| {
        facts
            .refuse_key(
                key,
                &format!(
                    "Kata {version} fails on this key in a drop-in, it is known \
                                       from {since} on, and it must be changed"
                ),
            )
            .cure("remove it: this Kata does not read it")
    };
    if facts.runtime == Runtime::Go {
        GO_KEYS_SINCE.iter().filter(unknown).map(refuse).collect()
    } else {
        Vec::new()
    }
}

fn hypervisor(facts: &Facts) -> Option<Refusal> {
    let section = facts.plan.section.as_str();
    let [go, rust] = SUPPORTED;
    let supported = if facts.runtime == Runtime::Go {
        go
    } else {
        rust
    };
    if supported.contains(&section) {
        return None;
    }
    let is_without = WITHOUT_GPUS.contains(&section);
    let why = match section {
        _ if is_without => "no GPU has been seen in its guests".into(),
        "remote" => "its guests start elsewhere, from an image of that place".into(),
        _ => format!("not a hypervisor of the {}", facts.runtime.name()),
    };
    let refusal = Refusal::at(&facts.config.base.path, why)
        .key("hypervisor", &format!("[hypervisor.{section}]"))
        .cure(format!(
            "use a configuration with {}",
            supported.join(" or ")
        ));
    Some(match is_without {
        true => refusal.forcible(),
        false => refusal,
    })
}

/// Refusals about the directory around the drop-in.
fn directory(facts: &Facts) -> Vec<Refusal> {
    let config = facts.config;
    let mut refusals = Vec::new();
    if let Some(first) = config.siblings.first() {
        let names: Vec<String> = config
            .siblings
            .iter()
            .filter_map(|p| Some(p.file_name()?.to_string_lossy().into_owned()))
            .collect();
        let which = if names.len() > 3 {
            format!("{} and {} more", names[..3].join(", "), names.len() - 3)
        } else {
            names.join(", ")
        };
        let refusal = Refusal::at(
            &config.drop_in_dir,
            format!("is read with {which} as well, so their guests would change too"),
        );
        let dir = first.parent().unwrap_or(Path::new("/")).join("gpu-init");
        refusals.push(
            refusal
                .cure(format!(
                    "copy the configuration to a directory of its own, like {}, for both \
                     containerd's ConfigPath and --kata-config",
                    dir.display()
                ))
                .forcible(),
        );
    }
    if facts.runtime == Runtime::Rust {
        let refuse = |link| {
            Refusal::at(
                link,
                "is a symbolic link, which runtime-rs refuses in config.d",
            )
            .cure("put the file itself there")
        };
        refusals.extend(config.links.iter().map(|link| refuse(link)));
    } else {
        let refused = config
            .others
            .iter()
            .filter_map(|source| Some((source, merge::refused_by_go(&source.table)?)));
        refusals.extend(refused.map(|(source, key)| {
            Refusal::at(
                &source.path,
                "the Go runtime fails on a key in capitals in a drop-in",
            )
            .key("key", &key)
            .cure("write it in lower case")
        }));
    }
    refusals
}

/// Confidential guests: a swapped image changes their launch measurement.
fn confidential(facts: &Facts) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    for key in ["snp_id_block", "snp_id_auth"] {
        if facts.has_text(key) {
            let why = "holds the launch digest of the present guest, so the firmware would not \
                       start another";
            refusals.push(
                facts
                    .refuse_key(key, why)
                    .cure("make ID block and ID authentication for the new one"),
            );
        }
    }
    if !facts.is_on("confidential_guest") {
        return refusals;
    }
    let why = match facts.guest.what {
        What::Initrd(_) => {
            "kernel and initrd are part of this guest's launch measurement, so attestation would \
             fail"
        }
        What::Image(_) => {
            "the command line, with the hash of the root, is part of this guest's launch \
             measurement, so attestation would fail"
        }
    };
    let mut refuse = |key, why| {
        refusals.push(
            facts
                .refuse_key(key, why)
                .cure("register the new measurement with the attestation service first")
                .forcible(),
        );
    };
    refuse("confidential_guest", why);
    if facts.guest.is_unmeasured_image() {
        refuse(
            "kernel_verity_params",
            "without the image's own (image replace-init --verity), no measurement covers this \
             confidential guest's root, which the host can change",
        );
    } else if facts.has_text("kernel_verity_params") {
        refuse(
            "kernel_verity_params",
            "the measured image is what this confidential guest's root of trust covers",
        );
    }
    refusals
}

/// Guests that start before their pod exists, and so without its GPUs.
fn prepared_guests(facts: &Facts) -> Vec<Refusal> {
    let why = "such a guest runs its init before its pod is there, so without the pod's GPUs";
    let section = facts.plan.section.as_str();
    let templates: &[&[&str]] = &[
        &["factory", "enable_template"],
        &["hypervisor", section, "factory", "enable_template"],
    ];
    let on = |path: &&&[&str]| facts.before.get(path) == Some(&Value::Boolean(true));
    let mut refusals: Vec<Refusal> = templates
        .iter()
        .filter(on)
        .map(|path| facts.refuse(path, why).cure("set it to false").forcible())
        .collect();
    let cache = ["factory", "vm_cache_number"];
    if facts
        .before
        .get(&cache)
        .and_then(Value::as_integer)
        .is_some_and(|number| number > 0)
    {
        refusals.push(facts.refuse(&cache, why).cure("set it to 0").forcible());
    }
    refusals
}

fn kernel_command_line(facts: &Facts) -> Vec<Refusal> {
    let path = ["hypervisor", facts.plan.section.as_str(), "kernel_params"];
    let Some(params) = facts.after.text(&path) else {
        return Vec::new();
    };
    // A plan exists only without an open quote, so the words can be split.
    let words = kernel_params::words(params).unwrap_or_default();
    let end = words
        .iter()
        .position(|word| *word == "--")
        .unwrap_or(words.len());
    let origin = facts.after.origin(&path).unwrap_or(&facts.config.base.path);
    let refuse = |value: &str, why: String| Refusal::at(origin, why).key(&path.join("."), value);
    let mut refusals = Vec::new();
    for word in words.iter().take(end) {
        let value = word
            .trim_matches('"')
            .split_once('=')
            .map_or("", |(_, value)| value.trim_matches('"'));
        match kernel_params::name(word).as_str() {
            "rdinit" if value != "/init" && matches!(facts.guest.what, What::Initrd(_)) => {
                refusals.push(
                    refuse(
                        word,
                        "the kernel would start this program of the initrd instead of /init".into(),
                    )
                    .cure("remove the word"),
                );
            }
            "init"
                if !INITS_OF_IMAGES.contains(&value)
                    && matches!(facts.guest.what, What::Image(_)) =>
            {
                let why = "the kernel would start this program of the image instead of /sbin/init, \
                           which kata-gpu-boot image replace-init sets";
                refusals.push(refuse(word, why.into()).cure("remove the word").forcible());
            }
            "agent.cdi_timeout" => match value.parse::<u64>() {
                Err(_) | Ok(0) => {
                    refusals.push(
                        refuse(
                            word,
                            "the agent panics on a timeout that is no number above 0".into(),
                        )
                        .cure("use 100, its default"),
                    );
                }
                Ok(seconds) if seconds < LEAST_CDI_TIMEOUT_S => {
                    let why = format!(
                        "the agent would give up on GPUs that take longer to bind; 8 can take \
                         {LEAST_CDI_TIMEOUT_S} s"
                    );
                    refusals.push(
                        refuse(word, why)
                            .cure("use 100, the agent's default")
                            .forcible(),
                    );
                }
                Ok(_) => {}
            },
            _ => {}
        }
    }
    if params.len() > MAX_COMMAND_LINE {
        let why = format!(
            "{} bytes, and the kernel cuts its command line at {MAX_COMMAND_LINE}, with what Kata \
             adds",
            params.len()
        );
        refusals.push(refuse(params, why).cure("remove words").forcible());
    }
    refusals
}

fn size_and_mode(facts: &Facts) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let memory = u64::try_from(default_memory(facts.before, &facts.plan.section))
        .unwrap_or(u64::MAX)
        .saturating_mul(MIB);
    if let What::Initrd(initrd) = &facts.guest.what {
        let (bytes, size) = (initrd.report.bytes, initrd.report.bytes.div_ceil(MIB));
        if bytes >= memory {
            let why = format!("the initrd's {size} MiB do not fit into the guest");
            refusals.push(
                facts
                    .refuse_key("default_memory", &why)
                    .cure("raise it to at least twice the initrd's unpacked size"),
            );
        } else if initrd.report.form == Form::Plain && bytes > memory / 2 {
            let why = format!(
                "the kernel unpacks the initrd's {size} MiB into a tmpfs of half the guest's memory"
            );
            refusals.push(
                facts
                    .refuse_key("default_memory", &why)
                    .cure(format!("raise it to {} or more", size * 2))
                    .forcible(),
            );
        }
    }
    if facts.is_on("rootless") && !facts.guest.for_everybody {
        let why = format!(
            "the hypervisor runs as another user, who cannot read the {}",
            facts.guest.key()
        );
        refusals.push(
            facts
                .refuse_key("rootless", &why)
                .cure(format!("chmod a+r {}", facts.guest.path.display())),
        );
    }
    refusals
}

/// A guest without a driver, and a configuration that has none for it either.
fn driver(facts: &Facts) -> Option<Refusal> {
    const KEY: &str = "guest_extension_images";
    let key = ["hypervisor", facts.plan.section.as_str(), KEY];
    let images = facts.after.get(&key).and_then(Value::as_array);
    let has_gpu = images.is_some_and(|images| images.iter().any(is_gpu_extension));
    if has_gpu || !facts.guest.driver_is_elsewhere() {
        return None;
    }
    let guest = facts.guest.key();
    let why = format!(
        "no part of NVIDIA's driver is in the {guest}, and no extension image \"{GPU_EXTENSION}\" \
         brings it: no GPU comes up"
    );
    let cure = match facts.guest.what {
        What::Initrd(_) => "put the driver into the initrd",
        What::Image(_) => {
            "add that extension image (Kata 4) to the configuration, or put the driver into the \
             image"
        }
    };
    Some(facts.refuse_key(KEY, &why).cure(cure).forcible())
}

/// Drop-ins after ours that override its keys.
fn overridden(facts: &Facts) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    for (key, wanted) in &facts.plan.keys {
        let path = ["hypervisor", facts.plan.section.as_str(), key];
        let Some(value) = facts.after.get(&path) else {
            refusals.push(
                Refusal::at(
                    &facts.config.drop_in_dir,
                    "a drop-in after ours replaces the whole section",
                )
                .key(&path.join("."), "absent"),
            );
            continue;
        };
        if value != wanted {
            let origin = facts
                .after
                .origin(&path)
                .unwrap_or(&facts.config.drop_in_dir);
            let why = format!("is read after {} and wins over it", drop_in::NAME);
            refusals.push(
                Refusal::at(origin, why)
                    .key(&path.join("."), &drop_in::inline(value))
                    .cure(format!(
                        "remove the key there, or give that file a name that sorts before {} by \
                         bytes, where 10- sorts before 7-",
                        drop_in::NAME
                    )),
            );
        }
    }
    refusals
}

/// Refuses anything but our unedited drop-in at its path. `install --remove` uses the same check.
pub fn own_file(found: &Found, path: &Path) -> Option<Refusal> {
    match found {
        Found::Absent | Found::Ours { edited: false, .. } => None,
        Found::Ours { edited: true, .. } => Some(
            Refusal::at(path, "was edited since it was written")
                .cure("put what you added into a drop-in of your own")
                .forcible(),
        ),
        Found::Link => Some(
            Refusal::at(
                path,
                "is a symbolic link, and only a file of ours is replaced or removed",
            )
            .cure("remove the link")
            .forcible(),
        ),
        Found::Other => Some(Refusal::at(path, "is not a file").cure("move it elsewhere")),
        Found::Foreign(_) => {
            Some(Refusal::at(path, "was not written by kata-gpu-boot").cure("move it elsewhere"))
        }
    }
}
