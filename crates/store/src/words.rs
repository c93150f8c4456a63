//! The macro for enumerations that only the control database uses: a word in storage, JSON and text alike.

/// Declares an enumeration whose values are words, with `as_str`, `Display`, `FromStr`, serde and binding.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $var:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $var),+ }
        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$var),+];
            /// The word used in storage and on the wire.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$var => $text),+ }
            }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
        impl std::str::FromStr for $name {
            type Err = flywheel_types::UnknownWord;
            fn from_str(s: &str) -> std::result::Result<Self, Self::Err> {
                match s {
                    $($text => Ok(Self::$var),)+
                    _ => Err(flywheel_types::UnknownWord(stringify!($name), s.to_owned())),
                }
            }
        }
        $crate::query::word_arg!($name);
    };
}
pub(crate) use words;
