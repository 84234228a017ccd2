//! Plan of our drop-in: section, keys and values. Data in, data out.
//!
//! `kernel_params` is written only to add words of ours: a copy of other files' words would hide
//! their later changes. `kernel_verity_params` is emptied where it is set, unless an image comes
//! with its own: the old value measures the unused image, and Cloud Hypervisor's command line would
//! still name it. `rootfs_type` is written where an image's root differs from the effective value.
//! With an initrd, the extension image `gpu` is removed: it holds the driver for a guest that boots
//! a common image, and would cost a disk and some 300 bytes of the kernel's command line. Other
//! extension images stay; with an image, which may be the common image, all stay.

use super::kernel_params;
use super::kernel_params::OpenQuote;
use crate::guest_disk::FileSystem;
use crate::kata::drop_in;
pub use crate::kata::drop_in::Plan;
use crate::kata::merge::Effective;
use crate::kata::refusal::Refusal;
use std::path::Path;
use toml::Value;

/// Extension image with the driver, which an initrd with the driver replaces.
pub const GPU_EXTENSION: &str = "gpu";

pub fn is_gpu_extension(image: &Value) -> bool {
    image.get("name").and_then(Value::as_str) == Some(GPU_EXTENSION)
}

/// Default of both runtimes for an absent or empty `rootfs_type`.
const DEFAULT_ROOTFS_TYPE: &str = "ext4";

/// Initrd or image that guests start from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    pub path: String,
    /// An image's file system, and its `kernel_verity_params`, or an empty text.
    pub image: Option<(FileSystem, String)>,
}

impl Plan {
    /// `before`: the configuration without our drop-in.
    pub fn of(
        before: &Effective,
        section: &str,
        root: &Root,
        parameters: Vec<String>,
    ) -> Result<Plan, Refusal> {
        let string = |text: &str| Value::String(text.to_string());
        let (image, initrd, verity) = match &root.image {
            None => ("", root.path.as_str(), ""),
            Some((_, verity)) => (root.path.as_str(), "", verity.as_str()),
        };
        let mut keys = vec![("image", string(image)), ("initrd", string(initrd))];
        let key = |key| ["hypervisor", section, key];
        let existing = before.get(&key("kernel_params"));
        let refuse = |why: &str| {
            let file = before
                .origin(&key("kernel_params"))
                .unwrap_or(Path::new("kernel_params"));
            let value = existing.map(drop_in::inline).unwrap_or_default();
            Refusal::at(file, why).key(&key("kernel_params").join("."), &value)
        };
        let existing_text = match existing {
            None => "",
            Some(Value::String(text)) => text,
            Some(_) => {
                return Err(refuse("is not a string, so the runtime refuses it too")
                    .cure("write one string"));
            }
        };
        // Check even without words to merge: with an open quote, the kernel joins words that the
        // runtime appends to the last word.
        let merged = kernel_params::merge(existing_text, &parameters).map_err(|OpenQuote| {
            refuse("has an open double quote, which swallows every word after it").cure("close it")
        })?;
        if !parameters.is_empty() {
            keys.push(("kernel_params", string(&merged)));
        }
        if !verity.is_empty() || before.text(&key("kernel_verity_params")).is_some() {
            keys.push(("kernel_verity_params", string(verity)));
        }
        let is_image = root.image.is_some();
        if let Some((file_system, _)) = &root.image {
            let now = before
                .text(&key("rootfs_type"))
                .unwrap_or(DEFAULT_ROOTFS_TYPE);
            if now != file_system.name() {
                keys.push(("rootfs_type", string(file_system.name())));
            }
        }
        let extensions = before
            .get(&key("guest_extension_images"))
            .and_then(Value::as_array);
        if let Some(extensions) = extensions.filter(|_| !is_image) {
            if extensions.iter().any(is_gpu_extension) {
                let others = extensions
                    .iter()
                    .filter(|image| !is_gpu_extension(image))
                    .cloned()
                    .collect();
                keys.push(("guest_extension_images", Value::Array(others)));
            }
        }
        Ok(Plan {
            section: section.into(),
            keys,
            parameters,
            image: is_image,
        })
    }
}

/// Installed words without the removed and replaced ones, and the new words.
pub fn parameters(
    installed: &[String],
    added: &[String],
    unset: &[String],
) -> Result<Vec<String>, Vec<Refusal>> {
    let is_named = |word: &str, name: &str| kernel_params::name(word) == kernel_params::name(name);
    let mut refusals = Vec::new();
    for word in added {
        if let Err(why) = kernel_params::check(word) {
            // Remove the wording of a boot, which ignores the word: here the word is refused.
            let why = why
                .replace(", ignored: ", ": ")
                .replace("; ignored, default: ", "; default: ");
            let refusal = Refusal::of_argument("--param", why.clone()).key("word", word);
            let is_explained = why.contains("kata-gpu-init parameters");
            refusals.push(if is_explained {
                refusal
            } else {
                refusal.cure("`kata-gpu-init parameters` lists all parameters")
            });
        }
    }
    for name in unset {
        if !installed.iter().any(|word| is_named(word, name)) {
            refusals.push(
                Refusal::of_argument("--unset", "is not among the installed words")
                    .key("name", name)
                    .cure(match installed {
                        [] => "none is installed".to_string(),
                        installed => format!("installed: {}", installed.join(" ")),
                    }),
            );
        }
    }
    if !refusals.is_empty() {
        return Err(refusals);
    }
    let mut words = installed.to_vec();
    words.retain(|word| !unset.iter().any(|name| is_named(word, name)));
    for word in added {
        words.retain(|earlier| !kernel_params::replaces(word, earlier));
        words.push(word.clone());
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kata::kata_config::Source;
    use crate::kata::merge::Runtime;

    fn plan_of(text: &str, root: Root, parameters: &[&str]) -> Result<Plan, Refusal> {
        let base = Source {
            path: "/c.toml".into(),
            bytes: Vec::new(),
            table: text.parse().unwrap(),
        };
        let before = Effective::of(Runtime::Go, &base, []);
        let parameters = parameters.iter().map(ToString::to_string).collect();
        Plan::of(&before, "qemu", &root, parameters)
    }

    fn plan(text: &str, parameters: &[&str]) -> Result<Plan, Refusal> {
        let root = Root {
            path: "/i".into(),
            image: None,
        };
        plan_of(text, root, parameters)
    }

    fn lines(plan: &Plan) -> Vec<String> {
        plan.keys
            .iter()
            .map(|(key, value)| format!("{key} = {}", drop_in::inline(value)))
            .collect()
    }

    fn keys(text: &str, parameters: &[&str]) -> Vec<String> {
        lines(&plan(text, parameters).unwrap())
    }

    fn image_keys(text: &str, file_system: FileSystem, verity: &str) -> Vec<String> {
        let root = Root {
            path: "/d".into(),
            image: Some((file_system, verity.into())),
        };
        lines(&plan_of(text, root, &[]).unwrap())
    }

    #[test]
    fn a_word_that_is_refused_is_not_called_ignored() {
        let refused = |word: &str| {
            parameters(&[], &[word.into()], &[])
                .unwrap_err()
                .iter()
                .map(ToString::to_string)
                .collect::<String>()
        };
        let (value, name) = (refused("gpuinit.log=debgu"), refused("gpuinit.bnd=auto"));
        assert!(
            value.ends_with(
                "debug, trace; default: auto; `kata-gpu-init parameters` lists all parameters"
            ),
            "{value}"
        );
        assert!(
            name.ends_with("unknown parameter: `kata-gpu-init parameters` lists them"),
            "{name}"
        );
    }

    #[test]
    fn only_what_must_change_is_written() {
        let plain = ["image = \"\"", "initrd = \"/i\""];
        assert_eq!(
            keys("[hypervisor.qemu]\nkernel_params = 'a=1'", &[]),
            plain,
            "what others write in kernel_params stays theirs"
        );
        assert_eq!(
            keys("[hypervisor.qemu]\nkernel_verity_params = ''", &[]),
            plain
        );
        assert_eq!(
            keys(
                "[hypervisor.clh]\nkernel_verity_params = 'root_hash=1'",
                &[]
            ),
            plain,
            "another section's"
        );
        assert_eq!(
            keys(
                "[hypervisor.qemu]\nkernel_verity_params = 'root_hash=1'",
                &[]
            )[2],
            "kernel_verity_params = \"\""
        );
        assert_eq!(
            keys(
                "[hypervisor.qemu]\nkernel_params = 'a=1'",
                &["gpuinit.gpus=8"]
            )[2],
            "kernel_params = \"a=1 gpuinit.gpus=8\""
        );
        let extensions = "[[hypervisor.qemu.guest_extension_images]]\nname = 'gpu'\npath = \
                          '/g'\n[[hypervisor.qemu.guest_extension_images]]\nname = 'coco'\npath = \
                          '/c'";
        assert_eq!(
            keys(extensions, &[])[2],
            "guest_extension_images = [{ name = \"coco\", path = \"/c\" }]"
        );
        assert_eq!(keys(&extensions.replace("gpu", "devkit"), &[]), plain);
    }

    #[test]
    fn an_image_brings_its_root_s_type_and_hash() {
        let plain = ["image = \"/d\"", "initrd = \"\""];
        let (ext4, erofs) = (FileSystem::Ext4, FileSystem::Erofs);
        for (text, file_system, verity, more) in [
            ("", ext4, "", ""), // ext4 is what an absent key means
            ("rootfs_type = ''", ext4, "", ""),
            ("rootfs_type = 'erofs'", erofs, "", ""),
            ("", erofs, "", "rootfs_type = \"erofs\""),
            ("rootfs_type = 'erofs'", ext4, "", "rootfs_type = \"ext4\""),
            (
                "kernel_verity_params = 'root_hash=1'",
                ext4,
                "",
                "kernel_verity_params = \"\"",
            ),
            (
                "",
                ext4,
                "root_hash=2",
                "kernel_verity_params = \"root_hash=2\"",
            ),
            // The image may be the one without a driver.
            (
                "[[hypervisor.qemu.guest_extension_images]]\nname = 'gpu'\npath = '/g'",
                ext4,
                "",
                "",
            ),
        ] {
            let found = image_keys(&format!("[hypervisor.qemu]\n{text}"), file_system, verity);
            assert_eq!(found[..2], plain, "{text}");
            assert_eq!(found[2..].join("\n"), more, "{text}");
        }
    }

    #[test]
    fn unmergeable_kernel_params_are_refused_with_key_and_value() {
        for (text, why) in [
            ("'a=\"b'", "open double quote"),
            ("['a']", "not a string"),
            ("1", "not a string"),
        ] {
            let refusal = plan(&format!("[hypervisor.qemu]\nkernel_params = {text}"), &[])
                .unwrap_err()
                .to_string();
            assert!(
                refusal.starts_with("/c.toml: hypervisor.qemu.kernel_params = ")
                    && refusal.contains(why),
                "{refusal}"
            );
        }
    }

    #[test]
    fn an_earlier_installs_params_stay_until_replaced_or_unset() {
        let strings = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let next = |installed: &[&str], added: &[&str], unset: &[&str]| {
            parameters(&strings(installed), &strings(added), &strings(unset))
        };
        assert_eq!(
            next(&["m.a=1", "b=2"], &[], &[]),
            Ok(strings(&["m.a=1", "b=2"]))
        );
        assert_eq!(
            next(&["m.a=1", "b=2"], &["m.a=3", "c"], &[]),
            Ok(strings(&["b=2", "m.a=3", "c"]))
        );
        assert_eq!(
            next(&["pci=a", "b=2"], &["pci=c", "pci=a"], &[]),
            Ok(strings(&["b=2", "pci=c", "pci=a"]))
        );
        assert_eq!(
            next(&["pci=a", "b=2", "pci=c"], &[], &["pci"]),
            Ok(strings(&["b=2"]))
        );
        assert_eq!(
            next(&["m.a=1"], &["m.a=2"], &["m.a"]),
            Ok(strings(&["m.a=2"]))
        );
        assert_eq!(next(&[], &["m.a=1", "m.a=2"], &[]), Ok(strings(&["m.a=2"])));
        assert!(
            next(&["a=1"], &[], &["b"]).unwrap_err()[0]
                .to_string()
                .contains("installed: a=1")
        );
        assert!(
            next(&[], &["gpuinit.bind=nonsense"], &[]).unwrap_err()[0]
                .to_string()
                .starts_with("--param: word = gpuinit.bind=nonsense: takes")
        );
    }
}
