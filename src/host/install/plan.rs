//! What our drop-in is to say: which section, which keys, which values. Data in, data out.
//!
//! `kernel_params` is written only where there are words of ours to put in: a copy of what others wrote would hide what they write later.
//! `kernel_verity_params` is emptied where it is set: it measures the image that is not used, and Cloud Hypervisor's command line would still name it.
//! The extension image `gpu` is left out: it holds the driver for a guest that boots a common image, and would cost a disk and some 300 bytes of the
//! kernel's command line. Other extension images stay.

use super::drop_in;
use super::kernel_params::{self, OpenQuote};
use super::merge::Effective;
use super::refusal::Refusal;
use std::path::Path;
use toml::Value;

/// The name of the extension image that an initrd with the driver in it stands in for.
const GPU_EXTENSION: &str = "gpu";

#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// X of `[hypervisor.X]`.
    pub section: String,
    pub keys: Vec<(&'static str, Value)>,
    /// Words of `kernel_params` that are ours, merged into the key's value.
    pub parameters: Vec<String>,
}

/// A key of the section, as text.
pub fn text<'a>(effective: &'a Effective, section: &str, key: &str) -> Option<&'a str> {
    effective.get(&["hypervisor", section, key])?.as_str()
}

impl Plan {
    /// `before`: what is effective without our drop-in.
    pub fn of(before: &Effective, section: &str, initrd: &str, parameters: Vec<String>) -> Result<Plan, Refusal> {
        let string = |text: &str| Value::String(text.to_string());
        let mut keys = vec![("image", string("")), ("initrd", string(initrd))];
        let existing = before.get(&["hypervisor", section, "kernel_params"]);
        let refuse = |why: &str| {
            let file = before.origin(&["hypervisor", section, "kernel_params"]).unwrap_or(Path::new("kernel_params"));
            let value = existing.map(drop_in::inline).unwrap_or_default();
            Refusal::at(file, why).key(&format!("hypervisor.{section}.kernel_params"), &value)
        };
        let existing_text = match existing {
            None => "",
            Some(Value::String(text)) => text,
            Some(_) => return Err(refuse("is not a string, so the runtime refuses it too").cure("write one string")),
        };
        // Looked at even with nothing to merge: with an open quote the kernel takes words that the runtime adds for part of the last one.
        let merged = kernel_params::merge(existing_text, &parameters)
            .map_err(|OpenQuote| refuse("has an open double quote, which swallows every word after it").cure("close it"))?;
        if !parameters.is_empty() {
            keys.push(("kernel_params", string(&merged)));
        }
        if text(before, section, "kernel_verity_params").is_some_and(|params| !params.is_empty()) {
            keys.push(("kernel_verity_params", string("")));
        }
        if let Some(extensions) = before.get(&["hypervisor", section, "guest_extension_images"]).and_then(Value::as_array) {
            let is_gpu = |image: &&Value| image.get("name").and_then(Value::as_str) == Some(GPU_EXTENSION);
            if extensions.iter().any(|image| is_gpu(&image)) {
                let others = extensions.iter().filter(|image| !is_gpu(image)).cloned().collect();
                keys.push(("guest_extension_images", Value::Array(others)));
            }
        }
        Ok(Plan { section: section.into(), keys, parameters })
    }
}

/// The words that are installed, without those that are taken out or replaced, and the new ones.
pub fn parameters(installed: &[String], added: &[String], unset: &[String]) -> Result<Vec<String>, Vec<Refusal>> {
    let mut refusals = Vec::new();
    for word in added {
        if let Err(why) = kernel_params::check(word) {
            // What a boot would do with it is not done here: it is refused.
            let why = why.replace(", ignored: ", ": ").replace("; ignored, default: ", "; default: ");
            let refusal = Refusal::of_argument("--param", why.clone()).key("word", word);
            let told = why.contains("kata-gpu-init parameters");
            refusals.push(if told { refusal } else { refusal.cure("`kata-gpu-init parameters` lists what there is") });
        }
    }
    for name in unset {
        if !installed.iter().any(|word| kernel_params::name(word) == kernel_params::name(name)) {
            refusals.push(Refusal::of_argument("--unset", "is not among the installed words").key("name", name).cure(match installed {
                [] => "none is installed".to_string(),
                installed => format!("installed: {}", installed.join(" ")),
            }));
        }
    }
    if !refusals.is_empty() {
        return Err(refusals);
    }
    let unset = |word: &String| unset.iter().any(|name| kernel_params::name(name) == kernel_params::name(word));
    let mut words: Vec<String> = installed.iter().filter(|word| !unset(word)).cloned().collect();
    for word in added {
        words.retain(|earlier| !kernel_params::replaces(word, earlier));
        words.push(word.clone());
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::install::kata_config::Source;
    use crate::host::install::merge::Runtime;

    fn plan(text: &str, parameters: &[&str]) -> Result<Plan, Refusal> {
        let base = Source { path: "/c.toml".into(), bytes: Vec::new(), table: text.parse().unwrap() };
        let before = Effective::of(Runtime::Go, &base, []);
        Plan::of(&before, "qemu", "/i", parameters.iter().map(ToString::to_string).collect())
    }

    fn keys(text: &str, parameters: &[&str]) -> Vec<String> {
        let plan = plan(text, parameters).unwrap();
        plan.keys.iter().map(|(key, value)| format!("{key} = {}", drop_in::inline(value))).collect()
    }

    #[test]
    fn a_word_that_is_refused_is_not_called_ignored() {
        let refused = |word: &str| parameters(&[], &[word.into()], &[]).unwrap_err().iter().map(ToString::to_string).collect::<String>();
        let (value, name) = (refused("gpuinit.log=debgu"), refused("gpuinit.bnd=auto"));
        assert!(value.ends_with("debug, trace; default: info; `kata-gpu-init parameters` lists what there is"), "{value}");
        assert!(name.ends_with("unknown parameter: `kata-gpu-init parameters` lists them"), "{name}");
    }

    #[test]
    fn only_what_must_change_is_written() {
        let plain = ["image = \"\"", "initrd = \"/i\""];
        assert_eq!(keys("[hypervisor.qemu]\nkernel_params = 'a=1'", &[]), plain, "what others write in kernel_params stays theirs");
        assert_eq!(keys("[hypervisor.qemu]\nkernel_verity_params = ''", &[]), plain);
        assert_eq!(keys("[hypervisor.clh]\nkernel_verity_params = 'root_hash=1'", &[]), plain, "another section's");
        assert_eq!(keys("[hypervisor.qemu]\nkernel_verity_params = 'root_hash=1'", &[])[2], "kernel_verity_params = \"\"");
        assert_eq!(keys("[hypervisor.qemu]\nkernel_params = 'a=1'", &["gpuinit.gpus=8"])[2], "kernel_params = \"a=1 gpuinit.gpus=8\"");
        let extensions = "[[hypervisor.qemu.guest_extension_images]]\nname = 'gpu'\npath = '/g'\n[[hypervisor.qemu.guest_extension_images]]\nname = 'coco'\npath = '/c'";
        assert_eq!(keys(extensions, &[])[2], "guest_extension_images = [{ name = \"coco\", path = \"/c\" }]");
        assert_eq!(keys(&extensions.replace("gpu", "devkit"), &[]), plain);
    }

    #[test]
    fn kernel_params_that_cannot_be_merged_are_refused_with_file_key_and_value() {
        for (text, why) in [("'a=\"b'", "open double quote"), ("['a']", "not a string"), ("1", "not a string")] {
            let refusal = plan(&format!("[hypervisor.qemu]\nkernel_params = {text}"), &[]).unwrap_err().to_string();
            assert!(refusal.starts_with("/c.toml: hypervisor.qemu.kernel_params = ") && refusal.contains(why), "{refusal}");
        }
    }

    #[test]
    fn words_of_an_earlier_install_stay_until_they_are_replaced_or_unset() {
        let strings = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let next = |installed: &[&str], added: &[&str], unset: &[&str]| parameters(&strings(installed), &strings(added), &strings(unset));
        assert_eq!(next(&["m.a=1", "b=2"], &[], &[]), Ok(strings(&["m.a=1", "b=2"])));
        assert_eq!(next(&["m.a=1", "b=2"], &["m.a=3", "c"], &[]), Ok(strings(&["b=2", "m.a=3", "c"])));
        assert_eq!(next(&["pci=a", "b=2"], &["pci=c", "pci=a"], &[]), Ok(strings(&["b=2", "pci=c", "pci=a"])));
        assert_eq!(next(&["pci=a", "b=2", "pci=c"], &[], &["pci"]), Ok(strings(&["b=2"])));
        assert_eq!(next(&["m.a=1"], &["m.a=2"], &["m.a"]), Ok(strings(&["m.a=2"])));
        assert_eq!(next(&[], &["m.a=1", "m.a=2"], &[]), Ok(strings(&["m.a=2"])));
        assert!(next(&["a=1"], &[], &["b"]).unwrap_err()[0].to_string().contains("installed: a=1"));
        assert!(
            next(&[], &["gpuinit.bind=nonsense"], &[]).unwrap_err()[0]
                .to_string()
                .starts_with("--param: word = gpuinit.bind=nonsense: takes")
        );
    }
}
