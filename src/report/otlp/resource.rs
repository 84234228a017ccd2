//! Attributes of the resource: the origin of every span.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;

/// Variable with attributes of the resource, as every OpenTelemetry SDK reads it.
pub const RESOURCE_VARIABLE: &str = "OTEL_RESOURCE_ATTRIBUTES";

/// Attributes of the resource by name.
pub type Resource = BTreeMap<String, String>;

/// Collects attributes of this machine and of the environment, whose attributes win.
pub fn of_this_machine() -> Result<Resource> {
    let line = |path: &str| {
        std::fs::read_to_string(path)
            .ok()
            .map(|text| text.trim().to_string())
            .filter(|text| !text.is_empty())
    };
    // An attribute that cannot be read is left out: nothing depends on these.
    let host = [
        ("host.name", line("/proc/sys/kernel/hostname")),
        ("host.id", line("/etc/machine-id")),
        ("host.arch", arch()),
    ];
    let host = host
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)));
    resource(environment(RESOURCE_VARIABLE)?.as_deref(), host)
}

/// Architecture under OpenTelemetry's name.
fn arch() -> Option<String> {
    Some(match std::env::consts::ARCH {
        "x86_64" => "amd64".into(),
        "aarch64" => "arm64".into(),
        other => other.into(),
    })
}

/// A variable of the environment.
pub fn environment(name: &str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(text) => Ok(Some(text)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(e) => Err(e).with_context(|| format!("read {name}")),
    }
}

fn resource<'a>(
    environment: Option<&str>,
    host: impl IntoIterator<Item = (&'a str, String)>,
) -> Result<Resource> {
    let mut resource: Resource = host
        .into_iter()
        .map(|(key, value)| (key.to_string(), value))
        .collect();
    let pairs = environment
        .map(|text| encoded_pairs(text).with_context(|| format!("read {RESOURCE_VARIABLE}")));
    resource.extend(pairs.transpose()?.unwrap_or_default());
    Ok(resource)
}

/// `key=value` pairs with commas between them and values percent-encoded: the form of
/// OpenTelemetry's variables.
pub fn encoded_pairs(text: &str) -> Result<Vec<(String, String)>> {
    let mut pairs = Vec::new();
    for text in text.split(',').filter(|text| !text.trim().is_empty()) {
        let (key, value) = pair(text)?;
        pairs.push((key, percent_decoded(&value)?));
    }
    Ok(pairs)
}

/// Parses `key=value`. The error leaves out the text: its value may be a secret.
fn pair(text: &str) -> Result<(String, String)> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => {
            Ok((key.trim().to_string(), value.trim().to_string()))
        }
        _ => bail!("want KEY=VALUE"),
    }
}

/// `%2C` as `,`.
fn percent_decoded(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
            _ => bail!("a % is not followed by two hexadecimal digits"),
        }
    }
    String::from_utf8(bytes).context("a value is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_come_from_host_and_environment() {
        let resource = resource(
            Some("host.name=a,k8s.node.name=n%2C1,x==,"),
            [("host.name", "h".to_string()), ("host.id", "i".to_string())],
        )
        .unwrap();
        let pairs: Vec<(&str, &str)> = resource
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        assert_eq!(
            pairs,
            [
                ("host.id", "i"),
                ("host.name", "a"),
                ("k8s.node.name", "n,1"),
                ("x", "=")
            ]
        );
        for environment in ["novalue", "a=%2", "a=%ff", "=x"] {
            let resource = super::resource(Some(environment), []);
            assert!(resource.is_err(), "{environment:?}");
        }
    }
}
