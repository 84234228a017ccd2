//! Enums whose values have names, for records, parameters and texts: each name stands beside its
//! value, once.

/// Declares an enum with a name for each value.
#[macro_export]
macro_rules! named {
    (
        $(#[$about:meta])*
        $access:vis enum $type:ident { $($(#[$text:meta])* $value:ident = $name:literal),+ $(,)? }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $access enum $type { $($(#[$text])* $value),+ }

        #[allow(dead_code, reason = "not every enum is listed, or read from its names")]
        impl $type {
            /// All values, in order.
            $access const ALL: [Self; [$($name),+].len()] = [$(Self::$value),+];

            $access const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name),+
                }
            }

            /// The value of that name.
            $access fn named(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.name() == name)
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
