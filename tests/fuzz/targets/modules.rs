//! A failure means that some text of depmod or modprobe.d crashes the plan of a load, keeps it from
//! ending, lists a module twice or leaves out the module itself. One input has the texts, with
//! lines of `%` between them.

#![no_main]

use kata_gpu_init::kernel_modules::index::Index;
use kata_gpu_init::kernel_modules::load_plan::{Found, Meaning, meaning, plan};
use kata_gpu_init::kernel_modules::settings::Settings;
use std::collections::HashSet;
use std::path::Path;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let mut parts = text.split("%\n");
    let mut part = || parts.next().unwrap_or_default();
    let index = Index::from_texts(part(), part(), part());
    let mut settings = Settings::default();
    for problem in settings.parse(Path::new("fuzz.conf"), part()) {
        assert!(problem.line > 0 && problem.to_string().len() < 2000);
    }
    for name in ["nvidia", "nvidia-uvm", "a"] {
        let Ok(Meaning::Modules(all)) = meaning(name, &index, &settings) else {
            continue;
        };
        for found in &all {
            assert!(
                !settings
                    .options(&found.module, found.alias.as_deref())
                    .contains(['\0', '\n'])
            );
            check(found, &index, &settings);
        }
    }
});

fn check(found: &Found, index: &Index, settings: &Settings) {
    let Ok(Some(plan)) = plan(found, index, settings) else {
        return;
    };
    let names: Vec<&str> = plan.modules.iter().map(|m| m.module.as_str()).collect();
    assert_eq!(
        names.iter().collect::<HashSet<_>>().len(),
        names.len(),
        "{names:?}"
    );
    assert!(
        plan.modules
            .iter()
            .any(|m| m.module == found.module && m.required),
        "{names:?}"
    );
}
